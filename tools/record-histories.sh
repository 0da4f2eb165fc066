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

# world FLAG... starts the sandbox with a worker; leave ends both.
world() {
  refit-sandbox up --name histories --until-exit $$ "$@" >/dev/null
  eval "$(refit-sandbox env --name histories)"
  refit setup
  refit-worker >"$home/worker.log" 2>&1 &
  worker_pid=$!
}
leave() {
  if [ -n "$worker_pid" ]; then kill "$worker_pid" 2>/dev/null || true; wait "$worker_pid" 2>/dev/null || true; fi
  worker_pid=
  refit-sandbox down --name histories
}
cleanup() {
  status=$?
  trap - EXIT INT TERM
  if [ $status != 0 ]; then tail -n 20 "$home/worker.log" >&2 || true; fi
  leave || true
  rm -rf "$home"
  exit $status
}
trap cleanup EXIT INT TERM

# A rollout continues as new where the server suggests it, here after its second
# batch: pool training has three, shared two.
cat >"$home/temporal" <<EOF
#!/usr/bin/env bash
exec "$PWD/bin/temporal" "\$@" --dynamic-config-value limit.historyCount.suggestContinueAsNew=80
EOF
chmod +x "$home/temporal"
export REFIT_SANDBOX_TEMPORAL=$home/temporal
world --pools shared=2,training=4

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

upgrade() { refit start -f "$home/plan.yaml" "$@" >/dev/null; }
sed 's/soakCanary: 2s/soakCanary: 1s/' examples/tensorfusion-upgrade.yaml >"$home/plan.yaml"

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

# A rollout that is started alone finishes what the aborted run has begun in
# the other pool.
refit start -f examples/rollout.yaml --id rollout >/dev/null
finish rollout 0
keep rollout

# The aborted run left one host on target; the next one does not come back.
refit-sandbox fault --name histories hypervisor-never-ready shared-001 >/dev/null
upgrade --id parked --set rollouts[0].strategy.hostTimeout=15s
until_code parked 3
refit-sandbox fault --name histories clear >/dev/null
refit retry parked --by ann --comment "repaired" >/dev/null
finish parked 0
keep parked

# Workers and clients alone, with new images. No hypervisor is touched, so auto
# update, which would replace them, stays off, as the plan accepts. A disruption
# budget keeps the clients, and their eviction is skipped.
images=values.inline.providerConfigs.nvidia.images
upgrade --id components \
  --set 'rollouts=[{component: worker, pools: [shared], workers: {acknowledgeLostSessions: true, batchPercentage: 50}}, {component: client, pools: [shared], clients: {perOwner: 1, limit: 8s}}]' \
  --set 'acknowledge=[T04, policy]' \
  --set $images.remoteWorker=registry.refit.local/tensorfusion/tensor-fusion-worker:v2.17.0 \
  --set $images.remoteClient=registry.refit.local/tensorfusion/tensor-fusion-client:v2.17.0
refit-sandbox fault --name histories pdb-blocks apps app=sample-tensor-fusion-shared >/dev/null
finish components 3
refit skip components --by ann --comment "the applications are next week's" >/dev/null
refit-sandbox fault --name histories clear >/dev/null
finish components 0
keep components

# A host whose GPU has to be reset by a person in the middle of its set-up,
# which takes the real agent on fake driver libraries.
leave
world --agents real --gpus 1 --pools shared=2
gpus=$home/histories/agents/shared-001/lib/gpu.state
[ -f "$gpus" ]
echo gpu.0.mig.needs.reset=1 >>"$gpus"
refit start -f examples/gpu-node.yaml --id gpu-node >/dev/null
until_code gpu-node 3
sed -i -e 's/mig\.pending=/mig.current=/' -e '/mig\.needs\.reset=/d' "$gpus"
refit retry gpu-node --by ann --comment "reset by hand" >/dev/null
finish gpu-node 0
keep gpu-node

# The runs on datastores are recorded by their tests, which bring a sandbox each
# and are the datastore's clients, too.
leave
TMPDIR=$home REFIT_TEST_RECORD=$out REFIT_BIN=$PWD/bin CGO_ENABLED=0 "${GO:-go}" test -trimpath -count=1 -timeout 40m -run '^(TestNATS|TestOpenBao|TestCassandra|TestCassandraGuideLocksOutAndIsRecovered|TestCassandraQuorumFirst)$' ./tests/datastores

# All or nothing: the recordings are of one build.
rm -rf "$testdata"
mv "$out" "$testdata"
