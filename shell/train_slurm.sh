#!/usr/bin/env bash
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Train under Slurm: one task a GPU, started by srun.
#   From a login node:  PARTITION=gpu GPUS=16 GPUS_PER_NODE=8 CPUS_PER_TASK=10 SRUN_ARGS="--time 24:00:00" bash shell/train_slurm.sh
#   As a batch job:     GPUS=16 sbatch -p gpu -N 2 --ntasks-per-node 8 --gres gpu:8 -c 10 -t 24:00:00 shell/train_slurm.sh
# Settings as in recipe.sh, further options as arguments. Before the time limit Slurm sends SIGUSR1 (SECONDS_TO_SAVE, or
# --signal of sbatch): the run saves a checkpoint, a batch job requeues itself (REQUEUE=0: not) and goes on from there.
set -euo pipefail
# sbatch runs a copy of this file from elsewhere; it is submitted from the repository, or INTERNVL_PACK_ROOT names it.
shell="$(dirname "${BASH_SOURCE[0]}")"
[ -f "$shell/recipe.sh" ] || shell="${INTERNVL_PACK_ROOT:-${SLURM_SUBMIT_DIR:-.}}/shell"
[ -f "$shell/recipe.sh" ] || { echo "error: $shell is not this repository's: set INTERNVL_PACK_ROOT to its folder" >&2 && exit 1; }
# shellcheck source=shell/lib.sh
. "$shell/lib.sh"
# shellcheck source=shell/recipe.sh
. "$ROOT/shell/recipe.sh"

PARTITION="${PARTITION:-}"
QUOTA_TYPE="${QUOTA_TYPE:-}"
GPUS="${GPUS:-8}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
CPUS_PER_TASK="${CPUS_PER_TASK:-10}"
SRUN_ARGS="${SRUN_ARGS:-}"
SECONDS_TO_SAVE="${SECONDS_TO_SAVE:-300}"
if ((GPUS < GPUS_PER_NODE)); then GPUS_PER_NODE="$GPUS"; fi
((GPUS % GPUS_PER_NODE == 0)) || die "GPUS=$GPUS is not a multiple of GPUS_PER_NODE=$GPUS_PER_NODE"
command -v srun >/dev/null || die "srun is not on the path: is this a Slurm cluster?"

ensure_python
cd "$ROOT"
finetune_arguments "$GPUS"
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
# srun makes an allocation where there is none: then the signal is its option. A batch job's reaches this script, which hands
# it to srun, and srun to the tasks. Slurm sends it once more than needed where SRUN_ARGS has a signal too, which is harmless.
signal=()
if [ -z "${SLURM_JOB_ID:-}" ]; then signal=(--signal="USR1@$SECONDS_TO_SAVE"); fi
status=0
# A task takes its place in the run from Slurm's variables.
# shellcheck disable=SC2086
run_logged "$OUTPUT_DIR/logs/train.log" srun ${PARTITION:+-p "$PARTITION"} ${QUOTA_TYPE:+--quotatype="$QUOTA_TYPE"} \
  --job-name="internvl-pack-$STAGE" --gres="gpu:$GPUS_PER_NODE" --ntasks="$GPUS" --ntasks-per-node="$GPUS_PER_NODE" \
  --cpus-per-task="$CPUS_PER_TASK" --kill-on-bad-exit=1 ${signal[@]+"${signal[@]}"} $SRUN_ARGS \
  "$PY" train/finetune.py "${ARGUMENTS[@]}" "$@" || status=$?

# Only what Slurm's own signal ended is queued again: a run that was cancelled (SIGTERM), or failed, is not.
if [ "$status" -eq "$INTERRUPTED" ] && [ "$SIGNALLED" = USR1 ] && [ -n "${SLURM_JOB_ID:-}" ] && [ "${REQUEUE:-1}" != 0 ]; then
  say "saved before the time limit: requeueing job $SLURM_JOB_ID"
  scontrol requeue "$SLURM_JOB_ID" || say "job $SLURM_JOB_ID cannot be requeued: submit it again, it goes on from its checkpoint"
fi
exit "$status"
