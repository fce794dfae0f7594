#!/usr/bin/env bash
# Train on the GPUs of this machine. Settings by environment (see recipe.sh), further options as arguments:
#   MODEL=... META=... STAGE=stage2 bash shell/train_single_node.sh [--num_train_epochs 2 ...]
#   GPUS=4 bash shell/train_single_node.sh
# SIGTERM or SIGUSR1 to this script saves a checkpoint and ends with status 75; run it again to go on (docs/multi-node.md).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=shell/recipe.sh
. "$ROOT/shell/recipe.sh"

ensure_python
cd "$ROOT"
GPUS="${GPUS:-$(count_gpus)}"
((GPUS > 0)) || die "no GPU found; set GPUS to the number of processes to train on a CPU"
finetune_arguments "$GPUS"
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
run_logged "$OUTPUT_DIR/logs/train.log" "$PY" -m train.launch --standalone --nproc_per_node "$GPUS" \
  train/finetune.py "${ARGUMENTS[@]}" "$@"
