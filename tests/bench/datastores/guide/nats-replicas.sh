#!/usr/bin/env bash
# The guide's 'Raise replication for HA' for NATS: list the streams, raise each
# that has one replica, and see that its configuration says three.
#
# Where a command is another one than the guide's:
#   nats stream report|edit|info   the bench's own tool in $REFIT_BENCH_TOOL,
#                                  straight to a server, with the services' nkey
#
# usage: nats-replicas.sh, with KUBECONFIG and REFIT_BENCH_TOOL
set -euo pipefail
kc() { kubectl -n nats-system "$@"; }

# Each exec of the guide's is one request of the API as well: the address.
stream() {
  local address
  address=$(kc get pod nats-0 -o jsonpath='{.status.podIP}')
  "$REFIT_BENCH_TOOL" nats "$address" "$@" <<<"$seed"
}

seed=$(kc get secret nats-nkeys -o go-template='{{index .data "user.key" | base64decode}}')
report=$(stream report)
while read -r name replicas; do
  [ "$replicas" = 1 ] || continue
  stream edit "$name" 3
  stream info "$name" | grep -qx 'Replicas: 3'
done <<<"$report"
