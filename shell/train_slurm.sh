#!/usr/bin/env bash
# Train under Slurm: one task a GPU, started by srun. From a login node, or inside an allocation (sbatch):
#   PARTITION=gpu GPUS=16 GPUS_PER_NODE=8 CPUS_PER_TASK=10 SRUN_ARGS="--time 24:00:00" bash shell/train_slurm.sh
# Settings as in recipe.sh, further options as arguments. Run it again after a requeue: it goes on from its last checkpoint.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=shell/recipe.sh
. "$ROOT/shell/recipe.sh"

PARTITION="${PARTITION:-}"
QUOTA_TYPE="${QUOTA_TYPE:-}"
GPUS="${GPUS:-8}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"
CPUS_PER_TASK="${CPUS_PER_TASK:-10}"
SRUN_ARGS="${SRUN_ARGS:-}"
((GPUS < GPUS_PER_NODE)) && GPUS_PER_NODE="$GPUS"
((GPUS % GPUS_PER_NODE == 0)) || die "GPUS=$GPUS is not a multiple of GPUS_PER_NODE=$GPUS_PER_NODE"
command -v srun >/dev/null || die "srun is not on the path: is this a Slurm cluster?"

# One task: Slurm's variables become torchrun's, then the program runs in its place.
if [ "${1:-}" = "--as-task" ]; then
  shift
  export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID" WORLD_SIZE="$SLURM_NTASKS"
  export LOCAL_WORLD_SIZE="$GPUS_PER_NODE"
  cd "$ROOT"
  exec "$PY" train/finetune.py "$@"
fi

ensure_python
cd "$ROOT"
export PY GPUS_PER_NODE
finetune_arguments "$GPUS"
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
if [ -n "${SLURM_JOB_NODELIST:-}" ] && command -v scontrol >/dev/null; then
  MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
fi
# A port of its own for each job, so that two jobs on a node do not meet.
export MASTER_PORT="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-$$} % 20000))}" MASTER_ADDR="${MASTER_ADDR:-}"
# Outside an allocation the first task's node is not known before srun starts the tasks.
# shellcheck disable=SC2016,SC2086
run_logged "$OUTPUT_DIR/logs/train.log" srun ${PARTITION:+-p "$PARTITION"} ${QUOTA_TYPE:+--quotatype="$QUOTA_TYPE"} \
  --job-name="internvl-pack-$STAGE" --gres="gpu:$GPUS_PER_NODE" --ntasks="$GPUS" --ntasks-per-node="$GPUS_PER_NODE" \
  --cpus-per-task="$CPUS_PER_TASK" --kill-on-bad-exit=1 $SRUN_ARGS \
  bash -c 'export MASTER_ADDR="${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
           exec bash "$0" --as-task "$@"' "$ROOT/shell/train_slurm.sh" "${ARGUMENTS[@]}" "$@"
