#!/usr/bin/env bash
# From a clean clone to a small trained code model on the CPU: set-up, build, prepare, train, evaluate, complete, infill.
# Run again, it goes on with an interrupted run, or says that it is finished and shows the model.
set -euo pipefail
cd "$(dirname "$0")/.."

config=configs/quickstart.toml
run=runs/quickstart data=runs/quickstart-data
onescale=build/release/onescale
limit=450 # seconds of all of it on two cores; training gets what the steps before it leave
tail=12   # seconds of what follows training

trap 'exit 130' INT TERM # the program saves and ends with 75, as when its time is up
step() { printf '\n== %s\n' "$*"; }
show() {
  printf '$ %s\n' "${*@Q}" >&2
  "$@"
}

step 'set-up and build'
bash scripts/setup.sh
[[ -f build/release/build.ninja ]] || cmake --preset release >/dev/null
cmake --build --preset release --target onescale -j "$(nproc)"

step 'prepare: the sources of the Python standard library that Debian ships'
library=$(/usr/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
show $onescale prepare --config $config --input "$library"

# Training in two parts, since the speed of the machine is not known: at the full rate for half of the time, which shows
# how many steps the other half holds, and those with a rate that falls to 0.
unplanned=1000000
minutes() { awk -v s="$1" 'BEGIN { printf "%.3f", (s > 60 ? s : 60) / 60 }'; }
setting() { sed -n "s/^$1 = //p" $run/config.toml 2>/dev/null || true; }
trained() { find $run/checkpoints -maxdepth 1 -name 'step-*' 2>/dev/null | sort | sed -n '$s/.*step-0*\([0-9]\)/\1/p'; }
code=0
train() {
  code=0
  show $onescale train --config $config "$@" || code=$?
  [[ $code -eq 0 || $code -eq 75 ]] || exit $code
}

before=$(trained) steps=$(setting steps) decay=$(setting decay_steps)
if [[ ${steps:-$unplanned} -eq $unplanned ]]; then
  step 'train: the first half of the time, at the full rate'
  start=$SECONDS
  train --steps $unplanned --max_minutes "$(minutes $(((limit - tail - SECONDS) / 2)))"
  took=$((SECONDS - start)) remain=$((limit - tail - SECONDS))
  reached=$(trained)
  decay=$(((reached - ${before:-0}) * (remain > took / 2 ? remain : took) * 17 / 20 / took))
  warmup=$(setting warmup_steps)
  if [[ $reached -lt $warmup ]]; then decay=$((reached + decay > warmup ? reached + decay - warmup : 1)) reached=$warmup; fi
  steps=$((reached + decay))
fi
step 'train: the second half, to a rate of 0'
train --steps "$steps" --decay_steps "$decay" --max_minutes "$(minutes $((limit - tail - SECONDS)))"

step 'evaluate on held-out files'
show $onescale eval --config $config --eval_rows 0 --model $run | tee $run/eval.txt

step 'complete'
prompt='def read_lines(path):
    """Return the lines of a file."""
    with open('
show $onescale generate --model $run --prompt "$prompt" --max_new_tokens 60 --temperature 0.5

step 'fill in'
show $onescale generate --model $run --infill --prompt 'class Point:
    def __init__(self, x, y):
        self.x = x
        ' --suffix '

    def move(self, x, y):
        self.x = x
        self.y = y
' --max_new_tokens 16 --temperature 0

step 'what it learnt'
/usr/bin/python3 - $run <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
steps = [line for line in lines if "event" not in line]
print(f"loss: first {steps[0]['loss']:.3f}, last {steps[-1]['loss']:.3f} after {len(steps)} steps")
PYTHON
echo "held out: $(cat $run/eval.txt)"
held_out=$(xargs -d '\n' cat <$data/val_documents.txt | wc -c)
xargs -d '\n' cat <$data/val_documents.txt | xz -9 | wc -c |
  awk -v bytes="$held_out" '{ printf "xz -9 of the same files, all at once: %.4f bits per byte\n", $1 * 8 / bytes }'
[[ $code -eq 0 ]] || echo "The time of $limit seconds was up before the last step: the same command goes on."
cat <<EOF2

The run lies in $run: metrics.jsonl, log.txt, config.toml, checkpoints. It took $SECONDS s.
Go on:         $onescale train --config $config --steps $((steps * 2)) --decay_steps $decay
Export:        $onescale export --model $run --out runs/quickstart-model --dtype bfloat16
transformers:  GPTBigCodeForCausalLM.from_pretrained("$(echo $run/checkpoints/step-* | awk '{ print $NF }')")
EOF2
