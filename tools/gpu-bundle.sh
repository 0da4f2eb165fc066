#!/usr/bin/env bash
# gpu-bundle.sh [DIR]: builds the node agent and its read-only GPU tests into DIR
# (bin/gpu) for a host that may have neither network nor Go, and checks that they
# are small enough to copy around.
set -euo pipefail
cd "$(dirname "$0")/.."
go=${GO:-go} dir=${1:-bin/gpu} limit_mib=60

# NVML's binding needs cgo; never link it with -z now.
export CGO_ENABLED=1 CGO_CFLAGS="-O1 -g -Wno-deprecated-declarations"
mkdir -p "$dir"
"$go" build -trimpath -ldflags "-s -w" -o "$dir/refit-gpuagent" ./gpuagent/cmd/refit-gpuagent
"$go" test -c -trimpath -ldflags "-s -w" -o "$dir/realgpu.test" ./gpuagent/realgpu
cat >"$dir/run.sh" <<'RUN'
#!/bin/sh
# run.sh [PAGE]: examines the GPUs of this host, changes nothing, and writes what
# it found to PAGE (gpu.md). Needs the NVIDIA driver and glibc; as root it sees
# more. Ends with 0 when nothing was found wrong.
dir=$(dirname "$0")
page=${1:-gpu.md}
REFIT_TEST_GPU=1 "$dir/realgpu.test" -test.v -test.count=1 -test.timeout=45m -test.run='^TestTheGPUsAsFound$' -page "$page"
code=$?
[ -f "$page" ] && echo "written: $page"
exit $code
RUN
chmod +x "$dir/run.sh"

kib=$(du -sk --apparent-size "$dir" | cut -f1)
echo "$dir: $((kib / 1024)) MiB (less than $limit_mib): copy it to the GPU host and run ./run.sh there"
if [ "$kib" -ge $((limit_mib * 1024)) ]; then
  echo "$dir is $kib KiB, expected less than $((limit_mib * 1024)): look at what the agent or its tests import now" >&2
  exit 1
fi
