#!/usr/bin/env bash
# Makes docs/pictures from a real run: the demo's upgrade at its first gate, on
# the Temporal UI and in a terminal. Installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/bin:$PATH CGO_ENABLED=0

browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
missing=
[ -n "$browser" ] || missing+=" chromium"
command -v script >/dev/null || missing+=" bsdutils"
if [ -n "$missing" ]; then
  echo "pictures: missing on this machine, by the name of its Debian package:$missing (CHROMIUM=PROGRAM names a browser of another name)" >&2
  exit 1
fi

home=$(mktemp -d)
export REFIT_SANDBOX_HOME=$home
worker_pid=
cleanup() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$worker_pid" ]; then kill "$worker_pid" 2>/dev/null || true; wait "$worker_pid" 2>/dev/null || true; fi
  refit-sandbox down --name pictures || true
  rm -rf "$home"
  exit $status
}
trap cleanup EXIT INT TERM
refit-sandbox up --name pictures --until-exit $$ --pools shared=4,training=4 >/dev/null
eval "$(refit-sandbox env --name pictures)"
refit setup
refit-worker >"$home/worker.log" 2>&1 &
worker_pid=$!

code=0
refit start -f examples/tensorfusion-upgrade.yaml --until-gate || code=$?
if [ $code != 5 ]; then
  echo "pictures: the run did not reach its gate (exit code $code)" >&2
  tail -n 20 "$home/worker.log" >&2
  exit 1
fi
run=TensorFusionUpgrade.sandbox.tensor-fusion-sys
run_id=$(temporal workflow describe -w "$run" -o json | sed -n 's/.*"runId": *"\([^"]*\)".*/\1/p' | head -n 1)

# A terminal of its own: colours and bars appear only there. It ends with 5,
# "waiting for an approval".
script -qec "stty cols 190 rows 60; refit watch $run" /dev/null </dev/null >"$home/terminal.txt" || [ $? = 5 ]
go run -trimpath ./tools/pictures terminal -title "refit watch" "$home/terminal.txt" docs/pictures/terminal.svg
go run -trimpath ./tools/pictures page -browser "$browser" -size 1400x1100 -until "Waits for approval" \
  "$REFIT_UI/namespaces/$TEMPORAL_NAMESPACE/workflows/$run/$run_id/user-metadata" docs/pictures/ui.png
ls -l docs/pictures
