#!/usr/bin/env bash
# The guide's 'Expand a single-member Cassandra first', as a person with a
# terminal does it, who answers at once: the same commands, waits and limits in
# the same order. It ends with 3 where the guide says stop: the administrator
# is refused.
#
# Where a command is another one than the guide's:
#   cqlsh   the bench's own tool in $REFIT_BENCH_TOOL, straight to the member,
#           with the password on its input as in the guide
#   jq, yq  kubectl's own jsonpath; the mode is the default one, preferred
#
# With `seeds` the patch of the zone rule also leaves cassandra-0 alone in
# CASSANDRA_SEEDS. The guide does not know that: it is for a script that gets to
# its end, so that there is a time to compare with.
#
# usage: cassandra.sh [seeds], with KUBECONFIG and REFIT_BENCH_TOOL
set -euo pipefail
seeds=${1-}
members="cassandra-0 cassandra-1 cassandra-2"
kc() { kubectl -n cassandra-system "$@"; }

cql_on() {
  local address
  address=$(kc get pod "$1" -o jsonpath='{.status.podIP}')
  "$REFIT_BENCH_TOOL" cql "$address" "$2" <<<"$password"
}

# admin is cql_on at the places where a refusal ends the procedure.
admin() {
  cql_on "$@" || { echo "the administrator is refused by $1: stop" >&2; exit 3; }
}

password=$(kc get secret cassandra-admin -o go-template='{{.data.password | base64decode}}')

kc get nodes -L topology.kubernetes.io/zone
template=
if [ "$seeds" = seeds ]; then
  list=$(kc get statefulset cassandra -o jsonpath='{.spec.template.spec.containers[?(@.name=="cassandra")].env[?(@.name=="CASSANDRA_SEEDS")].value}')
  template="\"containers\":[{\"name\":\"cassandra\",\"env\":[{\"name\":\"CASSANDRA_SEEDS\",\"value\":\"${list%%,*}\"}]}]"
fi
# "If any node has no zone label, skip this rule."
if ! kc get nodes -o jsonpath='{range .items[*]}{.metadata.labels.topology\.kubernetes\.io/zone}{"\n"}{end}' | grep -qx ''; then
  template="${template:+$template,}\"topologySpreadConstraints\":[{\"maxSkew\":1,\"topologyKey\":\"topology.kubernetes.io/zone\",\"whenUnsatisfiable\":\"ScheduleAnyway\",\"labelSelector\":{\"matchLabels\":{\"app.kubernetes.io/name\":\"cassandra\"}}}]"
fi
if [ -n "$template" ]; then
  kc patch statefulset cassandra --type strategic -p "{\"spec\":{\"template\":{\"spec\":{$template}}}}"
  kc rollout status statefulset/cassandra --timeout=10m
fi

test "$(kc get statefulset cassandra -o jsonpath='{.spec.replicas}')" -eq 1
kc scale statefulset cassandra --replicas=3
kc rollout status statefulset/cassandra --timeout=20m
# "Wait for all three members to be UN."
for attempt in {1..120}; do
  [ "$(kc exec cassandra-0 -c cassandra -- nodetool status | grep -c '^UN ')" = 3 ] && break
  sleep 1
done
kc get pods -l app.kubernetes.io/name=cassandra -o wide

CASSANDRA_DC=$(kc get statefulset cassandra -o jsonpath='{.spec.template.spec.containers[?(@.name=="cassandra")].env[?(@.name=="CASSANDRA_DC")].value}')
case "$CASSANDRA_DC" in
  ''|*[!A-Za-z0-9_-]*) echo "invalid Cassandra data-center name" >&2; exit 1 ;;
esac
admin cassandra-0 "ALTER KEYSPACE system_auth WITH replication = {'class': 'NetworkTopologyStrategy', '$CASSANDRA_DC': '3'};"
for pod in $members; do
  kc exec "$pod" -c cassandra -- nodetool repair --full system_auth
done
for pod in $members; do
  admin "$pod" "SELECT role FROM system_auth.roles LIMIT 1;" > /dev/null
  echo "administrator login ok on $pod"
done

EXISTING_KEYSPACES=$(admin cassandra-0 "SELECT keyspace_name FROM system_schema.keyspaces;")
for ks in nvcf_api nvct_api ess_api api_keys_api sis_api event_ledger nvcf_autoscaler; do
  if grep -qx "$ks" <<<"$EXISTING_KEYSPACES"; then
    admin cassandra-0 "ALTER KEYSPACE $ks WITH replication = {'class': 'NetworkTopologyStrategy', '$CASSANDRA_DC': '3'};"
  else
    echo "skipping $ks: not present in this installation"
  fi
done
for pod in $members; do
  kc exec "$pod" -c cassandra -- nodetool repair --full
done
