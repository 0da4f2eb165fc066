#!/usr/bin/env bash
# The guide's 'Replace the OpenBao pods', as a person with a terminal does it,
# who answers at once: the same commands, waits and limits in the same order.
# What the guide says in words ("wait until", "run it again") is a loop that
# asks again after a second.
#
# Where a command is another one than the guide's:
#   bao status   does not tell is_self with every server: curl asks the same
#                member's /v1/sys/leader in the same exec
#   127.0.0.1    the pod's own address: pods of the sandbox share one loopback
#   jq           kubectl's own jsonpath and go-template
#   delete pod   kubectl 1.32 waits in vain, until its limit, for a pod that is
#     --wait     gone and made anew between two of its requests; pods of the
#                sandbox take less than 100 ms. So the pod's UID is waited for.
#
# usage: openbao.sh IMAGE VERSION, with KUBECONFIG
set -euo pipefail
image=$1 version=$2
namespace=vault-system
members="openbao-server-0 openbao-server-1 openbao-server-2"

kc() { kubectl -n "$namespace" "$@"; }

# check_openbao prints one line for each member: its name, the seal status and
# who leads.
check_openbao() {
  local pod pods
  pods=$(kc get pods -l app.kubernetes.io/name=openbao,component=server -o jsonpath='{.items[*].metadata.name}') || return 1
  [ -n "$pods" ] || { echo "no OpenBao server pods found" >&2; return 1; }
  for pod in $pods; do
    printf '%s ' "$pod"
    kc exec "$pod" -c openbao -- sh -c \
      'export BAO_ADDR="http://${POD_IP:-127.0.0.1}:8200"; bao status -format=json && curl -s $BAO_ADDR/v1/sys/leader' | tr -d ' \n' || return 1
    echo
  done
}

# healthy: three members, unsealed, of one cluster, and one of them active. It
# leaves what it saw in $seen and the active member in $active.
healthy() {
  seen=$(check_openbao 2>/dev/null) || return 1
  [ "$(grep -c '"sealed":false' <<<"$seen")" = 3 ] || return 1
  [ "$(grep -o '"cluster_id":"[^"]*"' <<<"$seen" | sort -u | wc -l)" = 1 ] || return 1
  [ "$(grep -c '"is_self":true' <<<"$seen")" = 1 ] || return 1
  active=$(grep '"is_self":true' <<<"$seen" | cut -d' ' -f1)
}

# until_so asks for five minutes, as long as the guide lets a member be sealed.
until_so() {
  local end=$((SECONDS + 300))
  until "$@"; do
    [ "$SECONDS" -lt "$end" ] || { echo "not so within 5 minutes: $*" >&2; exit 1; }
    sleep 1
  done
}

# renewed waits until a pod of this name has another UID.
renewed() {
  local end=$((SECONDS + 180)) now
  until now=$(kc get pod "$1" -o jsonpath='{.metadata.uid}' 2>/dev/null) && [ "$now" != "$2" ]; do
    [ "$SECONDS" -lt "$end" ] || { echo "pod $1 is not gone within 3 minutes" >&2; exit 1; }
    sleep 0.1
  done
}

of_version() { healthy && grep "^$1 " <<<"$seen" | grep -q "\"version\":\"$version\""; }

replace() {
  local uid
  uid=$(kc get pod "$1" -o jsonpath='{.metadata.uid}')
  kc delete pod "$1" --wait=false
  renewed "$1" "$uid"
  kc wait "pod/$1" --for=condition=Ready --timeout=5m
  until_so of_version "$1"
}

moved() { healthy && [ "$active" != "$former" ]; }

[ "$(kc get statefulset openbao-server -o jsonpath='{.spec.replicas}')" != 1 ]
template=$(kc get statefulset openbao-server -o jsonpath='{range .spec.template.spec.containers[*]}{.name}{": "}{.image}{"\n"}{end}{"updateStrategy: "}{.spec.updateStrategy.type}{"\n"}')
echo "$template"
grep -q "/$image\$" <<<"$template"
grep -q 'updateStrategy: OnDelete' <<<"$template"
until_so healthy
former=$active
for pod in $members; do
  [ "$pod" = "$former" ] || replace "$pod"
done

until_so healthy
if [ "$active" = "$former" ]; then # leadership may have moved by itself
  kc get secret openbao-server-root-token -o go-template='{{.data.root_token | base64decode}}{{"\n"}}' |
    kc exec -i "$former" -c openbao -- sh -ec '
      IFS= read -r BAO_TOKEN
      test -n "$BAO_TOKEN"
      export BAO_TOKEN BAO_ADDR="http://${POD_IP:-127.0.0.1}:8200"
      bao operator step-down'
fi
until_so moved
replace "$former"

check_openbao
kc get pods -l app.kubernetes.io/name=openbao,component=server \
  -o jsonpath='{range .items[*]}{.metadata.name}{"\n"}{range .spec.containers[*]}{" "}{.name}{": "}{.image}{"\n"}{end}{end}'
