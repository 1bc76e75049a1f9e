#!/usr/bin/env bash
# Which line of SWEEP_FILE a task of sweep.sbatch takes, without a Slurm: a stand-in for train.sbatch says its arguments.
#   bash tests/scripts/sweep_test.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
mkdir -p scripts/slurm
echo 'echo "$*"' >scripts/slurm/train.sbatch

expect() { # TASK WHAT: what the task says, on either output
  local said
  said=$(SLURM_ARRAY_TASK_ID=$1 bash "$root/scripts/slurm/sweep.sbatch" sweep.txt runs --data d 2>&1) || true
  [[ $said == "$2" ]] || { echo "sweep_test: task $1 said '$said', not '$2'" >&2 && exit 1; }
}

for lines in '%s\n%s\n' '%s\n%s' '%s\r\n%s\r\n' '%s\r\n%s'; do
  for mark in '' '\xEF\xBB\xBF'; do
    # shellcheck disable=SC2059
    printf "$mark$lines" '--lr 1e-3' '--lr 2e-3 --seed 2' >sweep.txt
    expect 0 'runs/0 --data d --lr 1e-3'
    expect 1 'runs/1 --data d --lr 2e-3 --seed 2'
    expect 2 'sweep.sbatch: sweep.txt has no line for task 2: give --array=0-1'
  done
done
rm sweep.txt
expect 0 'sweep.sbatch: sweep.txt cannot be read: give the file of options, a line a run'
echo "sweep_test: every task took its line"
