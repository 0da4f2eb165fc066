#!/usr/bin/env bash
# Switches each check off in turn and requires that its test, and no other,
# notices: one test binary, one line per row.
set -euo pipefail
cd "$(dirname "$0")/.."
export CGO_ENABLED=0
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
rows=$(go run -trimpath ./tools/coverage -rows docs/tensorfusion-coverage.yaml)
go test -trimpath -c -o "$dir/checks" ./activities/tensorfusion
cd activities/tensorfusion

# check ROW TEST NAMES runs the test with the row off; NAMES is what its failed
# subtests must begin with.
failed=0
check() {
  local code=0 wrong
  REFIT_TEST_CHECK_OFF=$1 "$dir/checks" -test.count=1 -test.v -test.run "^$2\$" >"$dir/out" 2>&1 || code=$?
  wrong=$(grep -E '^ +--- FAIL: ' "$dir/out" | grep -vE "^ +--- FAIL: $3" || true)
  if [ $code = 0 ]; then
    echo "$1 not noticed: $2 passes without the check"; failed=1
  elif ! grep -qE "^ +--- FAIL: $3" "$dir/out"; then
    echo "$1 not noticed: $2 fails for another reason"; tail -n 20 "$dir/out"; failed=1
  elif [ -n "$wrong" ]; then
    echo "$1 noticed, but other cases fail too:"; echo "$wrong"; failed=1
  else
    echo "$1 noticed by $(grep -cE "^ +--- FAIL: $3" "$dir/out") of $2's cases"
  fi
}

for test in TestChecks TestTheCanaryJobBelievesOnlyAVerdict; do
  "$dir/checks" -test.count=1 -test.run "^$test\$" >"$dir/out" 2>&1 || { cat "$dir/out"; echo "$test fails with every check on" >&2; exit 1; }
done
for row in $rows; do
  check "$row" TestChecks "TestChecks/$row/"
done
check T20 TestTheCanaryJobBelievesOnlyAVerdict TestTheCanaryJobBelievesOnlyAVerdict/
exit $failed
