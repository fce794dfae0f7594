#!/usr/bin/env bash
# Train on several machines: run it on each, with the same settings and its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 GPUS_PER_NODE=8 bash shell/train_multi_node.sh
# Settings as in recipe.sh, further options as arguments. OUTPUT_DIR must be shared by the machines.
# SIGTERM or SIGUSR1 to one of them makes all save a checkpoint and end with status 75; run them again to go on.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=shell/recipe.sh
. "$ROOT/shell/recipe.sh"

for name in NNODES NODE_RANK MASTER_ADDR MASTER_PORT; do
  [ -n "${!name:-}" ] || die "$name is not set; see the top of ${BASH_SOURCE[0]}"
done
((NODE_RANK < NNODES)) || die "NODE_RANK=$NODE_RANK must be below NNODES=$NNODES"
ensure_python
cd "$ROOT"
GPUS_PER_NODE="${GPUS_PER_NODE:-$(count_gpus)}"
((GPUS_PER_NODE > 0)) || die "no GPU found; set GPUS_PER_NODE to the number of processes to train on a CPU"
finetune_arguments "$((NNODES * GPUS_PER_NODE))"
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
run_logged "$OUTPUT_DIR/logs/node$NODE_RANK.log" "$PY" -m train.launch \
  --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS_PER_NODE" \
  --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" train/finetune.py "${ARGUMENTS[@]}" "$@"
