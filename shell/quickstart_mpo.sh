#!/usr/bin/env bash
# 60 steps of MPO with a tiny InternVL: pairs are made of the demo data, the answer of another row being the rejected one.
# The last line is "SUMMARY {json}": losses, and the rewards' margins, which grow. Nothing is downloaded but packages.
#
#   bash shell/quickstart_mpo.sh            on a CPU: 2 processes, gloo; with GPUs: up to 2 of them, bf16, NCCL
#   WORK_DIR=/tmp/try STEPS=10 bash shell/quickstart_mpo.sh
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [ "$#" -gt 0 ]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  case "$1" in
    -h | --help) exit 0 ;;
    *) die "quickstart_mpo.sh takes no arguments: $*" ;;
  esac
fi

ensure_python
cd "$ROOT"
WORK_DIR="${WORK_DIR:-work_dirs/quickstart_mpo}"
META="$WORK_DIR/pairs.json"
prepare_quickstart
mkdir -p "$WORK_DIR"
rm -rf "$WORK_DIR/mpo"
say "pairs -> $META, tiny model -> $WORK_DIR/tiny"
"$PY" -m train.quickstart pairs shell/data/demo/demo.jsonl shell/data/demo/images "$WORK_DIR"
"$PY" train/make_tiny_model.py --meta_path shell/data/quickstart.json --output_dir "$WORK_DIR/tiny" --hidden_size "$width"

"$PY" -m torch.distributed.run --standalone --nproc_per_node "$ranks" train/finetune.py \
  --objective mpo --model_name_or_path "$WORK_DIR/tiny" --meta_path "$META" --output_dir "$WORK_DIR/mpo" \
  --force_image_size 56 --dynamic_image_size True --use_thumbnail True --max_dynamic_patch 6 \
  --use_packed_ds True --max_packed_tokens 2048 --num_images_expected 44 \
  --deepspeed zero_stage1 --max_steps "${STEPS:-60}" --learning_rate 5e-4 --warmup_steps 5 --lr_scheduler_type cosine \
  --grad_checkpoint False --logging_steps 1 --save_strategy no --report_to none "${device[@]}"

"$PY" -m train.quickstart preferences "$WORK_DIR/mpo"
