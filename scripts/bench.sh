#!/usr/bin/env bash
# Speed and memory of a training step against PyTorch's, in turn in one run: bash scripts/bench.sh [options of bench_table.py, see --help]
# With --layouts layouts over ranks against one process (options of bench_layouts.py), with --products only our matrix products against oneDNN's (--isa v3|v4, then options of tests/bench/products.cpp may follow).
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
  echo "bench.sh: $*" >&2
  exit 1
}

bash scripts/setup.sh
cmake --preset release >/dev/null
build() { cmake --build --preset release --target "$1" >/dev/null || fail "the target $1 does not build: cmake --build --preset release --target $1 says why"; }

if [[ ${1:-} == --products ]]; then
  shift
  isa=v3
  if [[ $(/lib64/ld-linux-x86-64.so.2 --help) == *'x86-64-v4 (supported'* ]]; then isa=v4; fi
  if [[ ${1:-} == --isa ]]; then isa=$2 && shift 2; fi
  build "products_bench_$isa"
  if [[ $isa == v3 ]]; then export ONEDNN_MAX_CPU_ISA=AVX2 DNNL_MAX_CPU_ISA=AVX2; fi
  exec "build/release/products_bench_$isa" "$@"
fi
build step_bench
if [[ ${1:-} == --layouts ]]; then exec python3 scripts/bench_layouts.py "${@:2}"; fi
if ! ldconfig -p | grep -q 'libtcmalloc_minimal\.so\.4'; then
  DEBIAN_FRONTEND=noninteractive apt-get install -y libtcmalloc-minimal4 >/dev/null 2>&1 ||
    fail "PyTorch's fastest setting needs tcmalloc: run as root apt-get install libtcmalloc-minimal4"
fi
exec python3 scripts/bench_table.py "$@"
