#!/usr/bin/env bash
# One build on other processors, which qemu stands in for: below x86-64-v3 one sentence; on one without AVX-512 a run has the bits of this
# processor's, and a run that this processor began goes on there bitwise. Exit code 77: cannot be run here.
# bash tests/scripts/processors_test.sh ONESCALE
set -euo pipefail
onescale=$(realpath "${1:?"processors_test.sh: give the program, such as build/release/onescale"}")
command -v qemu-x86_64 >/dev/null || { echo "processors_test.sh: qemu-x86_64 is not installed: bash scripts/setup.sh qemu-user" && exit 77; }
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
cp "$onescale" "$dir/onescale"
cd "$dir"
on() { qemu-x86_64 -cpu "$1" ./onescale "${@:2}"; }
fail() { echo "processors_test.sh: $*" >&2 && exit 1; }

mkdir text
for i in $(seq 200); do printf 'def f%d(x):\n    return x * %d\n' "$i" $((i * i)) >"text/$i.py"; done
./onescale prepare --input text --out data --vocab_size 290 --val_share 0 >/dev/null
train() { # RUN OPTIONS: the words before `train` are in "${how[@]}"
  "${how[@]}" train --data data --run_dir "$1" --n_layer 2 --n_head 3 --n_embd 48 --n_positions 32 --steps 6 --global_batch 4 --micro_batch 2 \
    --warmup_steps 2 --eval_every 0 --threads 2 "${@:2}"
}

how=(on Nehalem)
if train old >out 2>err; then fail 'a processor without AVX2 trained'; fi
[[ $(wc -l <err) -eq 1 ]] && grep -q 'lacks instructions of x86-64-v3' err || fail "a processor without AVX2 said: $(cat err)"

how=(./onescale)
train here >out
train both --stop_after 3 >out || [[ $? -eq 75 ]]
how=(on max) # of which qemu has AVX2 and FMA, but no AVX-512
train there >out
grep -q 'x86-64-v3' out || fail "it computed with: $(grep device out)"
train both >out
for run in there both; do
  for file in model optimizer; do
    cmp {here,$run}/checkpoints/step-00000006/$file.safetensors || fail "the run '$run' has other bits"
  done
done
