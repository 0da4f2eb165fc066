#!/usr/bin/env bash
# The main job on the embedded sandbox: a TensorFusion upgrade of 8 GPU nodes in
# 2 pools, with the gate after the canary. Each node has the real node agent, on
# fake driver libraries. Without a terminal, or with
# DEMO_YES=1, it approves by itself; in a terminal it waits for you and leaves
# the sandbox up until Ctrl-C.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
name=${DEMO_NAME:-demo}
export PATH=$root/bin:$PATH

interactive=0
if [ -t 0 ] && [ -t 1 ] && [ "${DEMO_YES:-}" != 1 ]; then interactive=1; fi
say() { printf '\n\033[1m%s\033[0m\n' "$*" | if [ -t 1 ]; then cat; else sed 's/\x1b\[[0-9;]*m//g'; fi; }

say "1. Build (first time about 10-20 minutes on 2 cores, later seconds)"
make --no-print-directory build

say "2. Sandbox: Kubernetes API, 8 GPU nodes with real node agents on fake GPUs, TensorFusion, Temporal"
worker_pid=
cleanup() {
  status=$?
  trap - EXIT INT TERM
  if [ -n "$worker_pid" ]; then kill "$worker_pid" 2>/dev/null || true; wait "$worker_pid" 2>/dev/null || true; fi
  refit-sandbox down --name "$name" || true
  exit $status
}
trap cleanup EXIT INT TERM
refit-sandbox up --name "$name" --until-exit $$ --agents real --pools shared=4,training=4 >/dev/null
eval "$(refit-sandbox env --name "$name")"
refit setup
refit-worker >"$REFIT_SANDBOX/worker.log" 2>&1 &
worker_pid=$!

say "3. Upgrade: examples/tensorfusion-upgrade.yaml"
echo "Temporal UI: $REFIT_UI"
run=$(refit start -f examples/tensorfusion-upgrade.yaml -o json | sed -n 's/.*"workflowID": *"\([^"]*\)".*/\1/p')
echo "run: $run"

code=0
while :; do
  refit watch "$run" --until-gate || code=$?
  case $code in
    5)
      if [ $interactive = 1 ]; then
        echo "Approve in another terminal (or on the page above); this one goes on by itself."
        code=0
        refit watch "$run" --follow || code=$?
        break
      fi
      refit approve "$run" --by demo --comment "approved by the demo itself"
      code=0 ;;
    *) break ;;
  esac
done

if [ $code = 3 ]; then
  echo "The run parked; its worker's log: $REFIT_SANDBOX/worker.log" >&2
  exit $code
fi

say "4. Receipt"
refit receipt "$run"
if [ $interactive = 1 ]; then
  say "The sandbox stays up: $REFIT_UI (Ctrl-C ends it)"
  echo "In another terminal: eval \"\$(bin/refit-sandbox env --name $name)\""
  trap 'exit 0' INT
  wait "$worker_pid" || true
fi
exit $code
