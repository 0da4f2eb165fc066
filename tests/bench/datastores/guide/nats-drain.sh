#!/usr/bin/env bash
# The guide's check of 'Drain pending work': every server is asked by its own
# monitoring port, and every memory stream with one replica must be empty.
#
# Where a command is another one than the guide's: none; it takes kubectl, curl
# and jq.
#
# usage: nats-drain.sh, with KUBECONFIG
set -euo pipefail
kc() { kubectl "$@"; }

NATS_DRAIN_DIR=$(mktemp -d)
trap 'rm -rf "$NATS_DRAIN_DIR"' EXIT
NATS_PODS=$(kc -n nats-system get pods -o json | jq -r '.items[] |
  select(any(.spec.containers[]; .name == "nats")) | .metadata.name')
test -n "$NATS_PODS"
for pod in $NATS_PODS; do
  (
    # The guide's fixed local port may be taken on a machine with more tests.
    kc -n nats-system port-forward --address 127.0.0.1 "pod/$pod" ":8222" \
      > "$NATS_DRAIN_DIR/$pod.log" 2>&1 &
    forward_pid=$!
    trap 'kill "$forward_pid" 2>/dev/null || true; wait "$forward_pid" 2>/dev/null || true' EXIT
    for attempt in {1..30}; do
      kill -0 "$forward_pid"
      grep -q 'Forwarding from 127.0.0.1:' "$NATS_DRAIN_DIR/$pod.log" && break
      sleep 1
    done
    port=$(sed -n 's/^Forwarding from 127.0.0.1:\([0-9]*\) .*/\1/p' "$NATS_DRAIN_DIR/$pod.log")
    curl --fail --silent --show-error --connect-timeout 5 --max-time 30 \
      "http://127.0.0.1:$port/jsz?accounts=true&streams=true&config=true" \
      > "$NATS_DRAIN_DIR/$pod.json"
    jq -e '.account_details | type == "array"' "$NATS_DRAIN_DIR/$pod.json"
    jq -e 'all(.account_details[];
      ((.stream_detail // []) | type == "array") and
      all((.stream_detail // [])[];
        (.config.storage | type == "string") and
        (.state.messages | type == "number")))' "$NATS_DRAIN_DIR/$pod.json"
  )
done
jq -se '[.[] | .account_details[]? | .stream_detail[]? |
    select(.config.storage == "memory" and (.config.num_replicas // 1) == 1) |
    {name: .name, messages: .state.messages}] |
  if length > 0 and all(.[]; .messages == 0)
  then . else error("Memory streams missing or not drained; do not roll NATS") end' \
  "$NATS_DRAIN_DIR/"*.json
