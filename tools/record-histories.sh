#!/usr/bin/env bash
# Records the histories that tests/replay replays: real runs on a sandbox, each
# with its children. Run it when a change of workflow code is meant to break
# the replay of older runs; otherwise the old recordings must keep passing.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/bin:$PATH
testdata=$PWD/tests/replay/testdata

# Histories name the artifact store, so its place is the same on every machine.
home=/var/tmp/refit-histories
mkdir "$home"
out=$home/recorded
export REFIT_SANDBOX_HOME=$home
worker_pid=
cleanup() {
  status=$?
  trap - EXIT INT TERM
  if [ $status != 0 ]; then tail -n 20 "$home/worker.log" >&2 || true; fi
  if [ -n "$worker_pid" ]; then kill "$worker_pid" 2>/dev/null || true; wait "$worker_pid" 2>/dev/null || true; fi
  refit-sandbox down --name histories || true
  rm -rf "$home"
  exit $status
}
trap cleanup EXIT INT TERM
refit-sandbox up --name histories --pools shared=2,training=2 >/dev/null
eval "$(refit-sandbox env --name histories)"
refit setup
refit-worker >"$home/worker.log" 2>&1 &
worker_pid=$!

# until_code RUN CODE watches until the run waits or closes and wants that exit code.
until_code() {
  local code=0
  refit watch "$1" --until-gate >"$home/watch.log" || code=$?
  if [ $code != "$2" ]; then
    cat "$home/watch.log" >&2
    echo "record-histories: run $1 ended its watch with $code, wanted $2" >&2
    return 1
  fi
}

# finish RUN CODE approves every gate until the run closes with that exit code.
finish() {
  local code
  while :; do
    code=0
    refit watch "$1" --until-gate >"$home/watch.log" || code=$?
    case $code in
      5) refit approve "$1" --by ann --comment "as planned" >/dev/null ;;
      "$2") return 0 ;;
      *) cat "$home/watch.log" >&2; echo "record-histories: run $1 ended with $code, wanted $2" >&2; return 1 ;;
    esac
  done
}

upgrade() { refit start -f examples/tensorfusion-upgrade.yaml --set rollouts[0].strategy.soakCanary=1s "$@" >/dev/null; }

# keep RUN writes the histories of the run and of every child.
keep() {
  local n=0 workflow run
  mkdir -p "$out/$1"
  while read -r workflow run; do
    n=$((n + 1))
    temporal workflow show -w "$workflow" -r "$run" -o json | gzip -9n >"$out/$1/$workflow.$n.json.gz"
  done < <(temporal workflow list --limit 1000 -q "WorkflowId = '$1' OR WorkflowId STARTS_WITH '$1.'" -o json |
    awk -F'"' '$2 == "workflowId" {w = $4} $2 == "runId" && w != "" {print w, $4; w = ""}' | sort -u)
  echo "$1: $n histories, $(du -sk "$out/$1" | cut -f1) KiB"
}

upgrade --id rolled-back
until_code rolled-back 5
refit reject rolled-back --by ann --comment "latency is up" >/dev/null
until_code rolled-back 3
refit rollback rolled-back --by ann >/dev/null
finish rolled-back 4
keep rolled-back

upgrade --id upgrade
until_code upgrade 5
refit pause upgrade --by ann >/dev/null
refit resume upgrade --by ann >/dev/null
finish upgrade 0
keep upgrade

refit start -f examples/tensorfusion-rollback.yaml --id rollback >/dev/null
finish rollback 0
keep rollback

upgrade --id aborted
until_code aborted 5
refit abort aborted --by ann --comment "another day" >/dev/null
finish aborted 4
keep aborted

# The aborted run left one host on target; the next one does not come back.
refit-sandbox fault --name histories hypervisor-never-ready shared-001 >/dev/null
upgrade --id parked --set rollouts[0].strategy.hostTimeout=15s
until_code parked 3
refit-sandbox fault --name histories clear >/dev/null
refit retry parked --by ann --comment "repaired" >/dev/null
finish parked 0
keep parked

# All or nothing: the recordings are of one build.
rm -rf "$testdata"
mv "$out" "$testdata"
