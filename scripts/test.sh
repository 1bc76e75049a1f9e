#!/usr/bin/env bash
# Everything that CI runs, in this order, until the first stage that fails; ends with the seconds of each stage.
# bash scripts/test.sh [--slow]     --slow adds the slow suites, and clang-tidy on every file instead of the changed ones.
set -euo pipefail
cd "$(dirname "$0")/.."

slow=false
case "${1:-}" in
  '') ;;
  --slow) slow=true ;;
  *) echo "test.sh: '$1' is no option: give --slow or nothing" >&2 && exit 2 ;;
esac
jobs=$(nproc)
table=()
trap 'printf "\n%-20s %8s\n" stage seconds; printf "%s\n" "${table[@]}"' EXIT

stage() {
  local name=$1 start=$SECONDS ok=true
  shift
  echo "== $name"
  "$@" || ok=false
  table+=("$(printf '%-20s %8d%s' "$name" $((SECONDS - start)) "$($ok || echo '  failed')")")
  $ok && return
  echo "test.sh: stage '$name' failed: its output is above" >&2
  exit 1
}

sources() { git ls-files --cached --others --exclude-standard -- "$@" | sort -u; }

format() { sources '*.h' '*.cpp' | xargs clang-format --dry-run -Werror; }

build() { cmake --preset "$1" >/dev/null && cmake --build --preset "$1" -j "$jobs"; }

# The .cpp files that differ from origin/main (from the commit before, when this is origin/main), or whose header does.
changed() {
  local base
  base=$(git merge-base HEAD origin/main 2>/dev/null || true)
  if [[ -z $base || $base == "$(git rev-parse HEAD)" ]]; then base=$(git rev-parse -q --verify HEAD~1 || true); fi
  { git diff --name-only --diff-filter=d "${base:-$(git hash-object -t tree /dev/null)}" -- '*.h' '*.cpp'
    git ls-files --others --exclude-standard -- '*.h' '*.cpp'; } |
    while read -r file; do if [[ -f ${file%.*}.cpp ]]; then echo "${file%.*}.cpp"; fi; done | sort -u
}

tidy() {
  local files
  if $slow; then files=$(sources '*.cpp'); else files=$(changed); fi
  [[ -n $files ]] || return 0
  # clang 14 knows neither this option of GCC nor its precompiled headers nor the names of levels.
  mkdir -p build/tidy
  sed -E 's/ (-fno-gnu-unique|-Winvalid-pch|-include [^ ]*cmake_pch.hxx)//g' build/release/compile_commands.json >build/tidy/compile_commands.json
  xargs -P "$jobs" -n 1 clang-tidy --quiet --extra-arg=-Wno-unknown-warning-option '--extra-arg=-D__builtin_cpu_supports(x)=1' -p build/tidy <<<"$files" 2> >(grep -v 'warnings\? .*generated' >&2)
}

tests() { ctest --test-dir "build/$1" -L "$2" -j "$jobs" --output-on-failure --progress --no-tests=error; }

needs=()
if $slow; then needs=(slurmctld slurmd slurm-client munge iproute2 qemu-user); fi
stage set-up bash scripts/setup.sh "${needs[@]}"
stage format format
stage 'build release' build release
stage unit tests release '^unit$'
stage golden tests release '^golden$'
stage parity tests release '^parity$'
stage clang-tidy tidy
stage 'build asan' build asan
stage sanitizers tests asan '^(unit|golden)$'
if $slow; then stage slow tests release '^slow$'; fi
