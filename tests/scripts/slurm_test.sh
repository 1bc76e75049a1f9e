#!/usr/bin/env bash
# scripts/slurm under Debian's Slurm: a controller and two nodes on loopback in a network namespace of their own, needing root. Two nodes x
# two ranks train, are stopped by USR1, requeue themselves, resume and end with the losses of a run that nothing stopped.
# bash tests/scripts/slurm_test.sh ONESCALE     exit code 77: cannot be run here
set -euo pipefail
if [[ -z ${SLURM_TEST_DIR:-} ]]; then
  onescale=$(realpath "${1:?"slurm_test.sh: give the program, such as build/release/onescale"}")
  self=$(realpath "$0")
  cd "$(dirname "$self")/../.."
  for need in slurmctld slurmd srun munged unshare ip; do
    command -v $need >/dev/null || PATH=$PATH:/usr/sbin command -v $need >/dev/null ||
      { echo "slurm_test.sh: $need is not installed: bash scripts/setup.sh slurmctld slurmd slurm-client munge iproute2" && exit 77; }
  done
  [[ $(id -u) -eq 0 ]] && unshare -n true || { echo "slurm_test.sh: needs root, for a network namespace" && exit 77; }
  SLURM_TEST_DIR=$(mktemp -d)
  export SLURM_TEST_DIR
  trap 'rm -rf "$SLURM_TEST_DIR"' EXIT
  # The daemons end with the namespace of processes.
  unshare --net --uts --pid --mount --fork --mount-proc --kill-child bash "$self" "$onescale"
  exit
fi

onescale=$1 dir=$SLURM_TEST_DIR PATH=$PATH:/usr/sbin
chmod 755 "$dir"
mkdir "$dir"/{state,jobs,tmp-n0,tmp-n1}
ln -s "$PWD/scripts" "$dir/jobs/scripts" # jobs run where their output may lie
hostname localhost
ip link set lo up
ip addr add 10.254.254.1/32 dev lo

head -c 1024 /dev/urandom >"$dir/key" && chmod 600 "$dir/key"
munged --force --key-file="$dir/key" --socket="$dir/munge" --pid-file="$dir/munge.pid" --log-file="$dir/munge.log" --seed-file="$dir/seed"
export SLURM_CONF=$dir/slurm.conf
# cred_expire: a requeued job waits for so long instead of two minutes.
cat >"$SLURM_CONF" <<CONF
ClusterName=lo
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$dir/munge,cred_expire=5
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SrunPortRange=60001-60100
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool-%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd-%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SwitchType=switch/none
TmpFS=$dir/tmp-%n
SlurmdParameters=config_overrides
NodeName=n[0-1] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES State=UP
CONF
slurmctld -D >/dev/null 2>&1 &
slurmd -D -N n0 >/dev/null 2>&1 &
slurmd -D -N n1 >/dev/null 2>&1 &

fail() {
  echo "slurm_test.sh: $*" >&2
  tail -n 20 "$dir"/jobs/*.out "$dir"/jobs/logs/*/*.log "$dir/slurmctld.log" >&2 || true
  exit 1
}
wait_for() { # a condition, for at most a number of seconds
  local tries=$(($1 * 5))
  shift
  until "$@"; do
    ((--tries > 0)) || fail "waited in vain for: $*"
    sleep 0.2
  done
}
nodes_idle() { [[ $(sinfo -h -t idle -o %D 2>/dev/null) == 2 ]]; }
job_over() { [[ -z $(squeue -h -j "$1" 2>/dev/null) ]]; }
steps_done() { [[ -e $1/metrics.jsonl && $(wc -l <"$1/metrics.jsonl") -ge $2 ]]; }
ends() { [[ $(grep -o '^exit [0-9]*' "onescale-$1.out" | tr '\n' ' ') == "$2 " ]] || fail "job $1 has other ends than $2"; }
wait_for 30 nodes_idle

cd "$dir/jobs"
# Nodes are told apart by name, so that Open MPI takes them for two machines and needs a network: loopback, which it leaves out by itself.
export OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo OMP_WAIT_POLICY=passive
submit() { sbatch --parsable "$@"; }
nodes=(--nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=10)

# A stand-in for the program, which needs no MPI, tells what the scripts do with exit codes.
cat >stand_in <<'PROGRAM'
#!/usr/bin/env bash
[[ $* != *--code* ]] || exit "${@: -1}"
run=$3
sleep "0.$SLURM_PROCID" # ranks do not end at once
if [[ ! -d $run/checkpoints ]]; then
  sleep 0.5
  mkdir -p "$run/checkpoints/step-00000001" && exit 75
fi
echo "rank $SLURM_PROCID of $SLURM_STEP_NUM_TASKS: $*"
PROGRAM
chmod +x stand_in
printf '%s\n' '--lr 1e-3' '--lr 2e-3 --seed 2' >sweep.txt
stuck=$(ONESCALE=./stand_in submit "${nodes[@]}" scripts/slurm/train.sbatch stuck --code 75)
sweep=$(ONESCALE=./stand_in submit --array=0-1%1 "${nodes[@]}" scripts/slurm/sweep.sbatch sweep.txt sweep --data d)
wait_for 60 job_over "$stuck"
grep -q 'not requeued: no checkpoint was gained' "onescale-$stuck.out" || fail "a run that gains nothing is not let go"
ends "$stuck" 'exit 75'
wait_for 120 job_over "$sweep"
for task in 0 1; do
  grep -q 'start 2, 4 ranks on n\[0-1\], from step-00000001' "sweep-${sweep}_$task.out" || fail "task $task of the sweep was not requeued"
  ls logs/sweep-*/rank-3.log >/dev/null || fail "ranks have no logs of their own"
done
cat logs/sweep-*/rank-3.log
grep -qx "rank 3 of 4: train --run_dir sweep/1 --threads 1 --data d --lr 2e-3 --seed 2" logs/sweep-*/rank-3.log || fail "wrong options in the sweep"
echo "stand-in: requeued with progress, not without, in an array too"

# The trainer.
mkdir text && cp -r "$OLDPWD"/{train,model} text
"$onescale" prepare --input text --pattern '*.cpp' --pattern '*.h' --out data --vocab_size 400 >/dev/null
export ONESCALE=$onescale
options=(--data data --n_embd 32 --n_layer 2 --n_head 4 --n_positions 64 --zero 2 --global_batch 8 --micro_batch 1 --eval_every 0
         --steps 150 --save_every 40 --attn_pdrop 0.1)
whole=$(submit "${nodes[@]}" scripts/slurm/train.sbatch whole "${options[@]}")
wait_for 120 job_over "$whole"
ends "$whole" 'exit 0'
losses() { sed -n 's/.*"step": *\([0-9]*\),.*"loss": *\([^,]*\),.*"good_tokens".*/\1 \2/p' "$1/metrics.jsonl"; }
for signal in USR1 INT TERM; do
  run=cut_$signal
  cut=$(submit "${nodes[@]}" scripts/slurm/train.sbatch "$run" "${options[@]}")
  wait_for 60 steps_done "$run" 30
  scancel --signal=$signal "$cut"
  wait_for 120 job_over "$cut"
  cat "onescale-$cut.out"
  ends "$cut" 'exit 75 exit 0'
  [[ $(losses "$run" | wc -l) -eq 150 ]] || fail "the run that was stopped has $(losses "$run" | wc -l) of 150 steps"
  cmp <(losses whole) <(losses "$run") || fail "the losses of the two runs differ"
  echo "trainer: 150 steps on 2 nodes x 2 ranks, stopped by $signal, requeued, resumed: losses equal to the last bit, at the end $(losses "$run" | tail -n 1)"
done
