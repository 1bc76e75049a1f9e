#!/usr/bin/env bash
# From a clean clone to a small trained code model on the CPU: set-up, build, prepare, train, evaluate, complete, infill.
# Run again, it goes on with an interrupted run, or says that it is finished and shows the model.
set -euo pipefail
cd "$(dirname "$0")/.."

config=configs/quickstart.toml
run=runs/quickstart
onescale=build/release/onescale
limit_minutes=7.5 # of all of it on two cores; training gets what the steps before it leave

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

step 'train'
left=$(awk -v limit=$limit_minutes -v used=$SECONDS 'BEGIN { m = limit - 0.5 - used / 60; print (m > 1 ? m : 1) }')
code=0
show $onescale train --config $config --max_minutes "$left" || code=$?
[[ $code -eq 0 || $code -eq 75 ]] || exit $code

step 'evaluate on held-out files'
show $onescale eval --config $config --eval_rows 0 --model $run | tee $run/eval.txt

step 'complete'
prompt='def read_lines(path):
    """Return the lines of a file."""
    with open('
show $onescale generate --model $run --prompt "$prompt" --max_new_tokens 60 --temperature 0.5

step 'fill in'
show $onescale generate --model $run --infill --prompt 'def add(a, b):
    return' --suffix '

def subtract(a, b):
    return a - b
' --max_new_tokens 24 --temperature 0.2

step 'what it learnt'
/usr/bin/python3 - $run <<'PYTHON'
import json, sys
lines = [json.loads(line) for line in open(sys.argv[1] + "/metrics.jsonl")]
steps = [line for line in lines if "event" not in line]
print(f"loss: first {steps[0]['loss']:.3f}, last {steps[-1]['loss']:.3f} after {len(steps)} steps")
PYTHON
echo "held out: $(cat $run/eval.txt)"
[[ $code -eq 0 ]] || echo "The time of $limit_minutes minutes was up before the last step: the same command goes on."
cat <<EOF2

The run lies in $run: metrics.jsonl, log.txt, config.toml, checkpoints. It took $SECONDS s.
Go on:         $onescale train --config $config --steps 2000
Export:        $onescale export --model $run --out runs/quickstart-model --dtype bfloat16
transformers:  GPTBigCodeForCausalLM.from_pretrained("$(echo $run/checkpoints/step-* | awk '{ print $NF }')")
EOF2
