#!/usr/bin/env bash
# What the build must hold for one program to run on every processor, read from its objects and from the sources of kernels/cpu.
# bash tests/scripts/level_objects_test.sh BUILD_DIR
set -euo pipefail
build=$(realpath "${1:?"level_objects_test.sh: give the build directory"}")
cd "$(dirname "$0")/../.."

ok=true scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
none() { # SENTENCE LINES
  [[ -z $2 ]] && return
  printf 'level_objects_test.sh: %s:\n%s\n' "$1" "$(head -n 20 <<<"$2")" >&2
  ok=false
}

for isa in v3 v4; do
  object=$build/cpu_$isa.o
  none "cpu_$isa.o shows more than its device" "$(nm -C --defined-only --extern-only "$object" | grep -v " T onescale::cpu::$isa::make_device(int, bool)" || true)"
  none "cpu_$isa.o holds functions of another level" "$(nm -C "$object" | grep "onescale::cpu::v[^${isa#v}]" || true)"
  # A vector in a mangled name, as an argument or as what a template returns.
  none "a vector crosses a call in cpu_$isa.o" "$(nm "$object" | grep -E ' [a-zA-Z] .*(Dv[0-9]|7SixteenI|8Philox16)' | c++filt || true)"
  none "a vector is taken apart into lanes in cpu_$isa.o" "$(objdump -d --no-show-raw-insn "$object" | grep -E 'vextractps|vp(extr|insr)d' || true)"
  none "cpu_$isa.o runs code before main" "$(objdump -h "$object" | grep -E '\.(init_array|ctors)' || true)"
done
none "256-bit or 512-bit registers outside of kernels/cpu" \
  "$(for folder in kernels parallel data model train; do
    cd "$scratch" && rm -f ./*.o && ar x "$build/libonescale_$folder.a" && rm -f cpu_v?.o && objdump -d --no-show-raw-insn ./*.o | grep -E '%[yz]mm' || true
  done)"
# Those of the first rule whose names do not tell, since they return a vector and take none.
vector='(f16x|i16x|u16x|h16x|d16x|Sixteen<T>|vec|uvec|hvec|Wide|Philox16|Curve|V)'
none "not always inlined, but returns or takes vectors" \
  "$(grep -nE "^ *((static|inline|constexpr) )*($vector [a-z_0-9]+\(.*|[a-zA-Z0-9_:]+ [a-z_0-9]+\((.*, )?(const )?$vector&? [a-z_]+[,)].*)\{ *\$" kernels/cpu/* | grep -v always_inline || true)"
$ok
