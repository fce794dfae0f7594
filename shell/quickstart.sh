#!/usr/bin/env bash
# From a fresh clone to packed training in one command: set up, make a tiny model, train it on the demo data with
# packing, train it again padded, compare. The last line is "SUMMARY {json}". Nothing is downloaded but packages.
#
#   bash shell/quickstart.sh            on a CPU: 2 processes, gloo; with GPUs: up to 2 of them, bf16, NCCL
#   bash shell/quickstart.sh --family qwen3_vl      or qwen2_5_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe, glm4v; internvl by default
#   WORK_DIR=/tmp/try WORKERS=0 bash shell/quickstart.sh      WORKERS: reader processes a rank, 3 by default
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

family=internvl
if [ "${1:-}" = --family ] && [ "$#" -eq 2 ]; then
  family="$2"
elif [ "$#" -gt 0 ]; then
  sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  case "$1" in
    -h | --help) exit 0 ;;
    *) die "quickstart.sh takes --family NAME and no other arguments: $*" ;;
  esac
fi
case "$family" in
  internvl)
    pictures=(--force_image_size 56 --dynamic_image_size True --use_thumbnail True --max_dynamic_patch 6 --num_images_expected 44)
    ;;
  qwen2_5_vl | qwen3_vl | qwen3_vl_moe | qwen3_5 | qwen3_5_moe | glm4v) pictures=(--min_pixels 4096 --max_pixels 65536) ;;
  *) die "quickstart.sh --family $family: use internvl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_5_moe or glm4v" ;;
esac

ensure_python
cd "$ROOT"
WORK_DIR="${WORK_DIR:-work_dirs/quickstart}"
WORKERS="${WORKERS:-3}"
META="shell/data/quickstart.json"
prepare_quickstart
mkdir -p "$WORK_DIR"
rm -rf "$WORK_DIR/packed" "$WORK_DIR/padded"
say "tiny model -> $WORK_DIR/tiny"
"$PY" train/make_tiny_model.py --meta_path "$META" --output_dir "$WORK_DIR/tiny" --hidden_size "$width" \
  --family "$family"

# The same model, data, seed and budgets both times; only how samples share rows differs.
train() {
  local mode="$1"
  shift
  "$PY" -m torch.distributed.run --standalone --nproc_per_node "$ranks" train/finetune.py \
    --model_name_or_path "$WORK_DIR/tiny" --meta_path "$META" --output_dir "$WORK_DIR/$mode" \
    "${pictures[@]}" --max_packed_tokens 2048 --max_seq_length 2048 \
    --deepspeed zero_stage1 --num_train_epochs 1 --learning_rate 2e-3 --warmup_steps 5 --lr_scheduler_type cosine \
    --dataloader_num_workers "$WORKERS" --grad_checkpoint False --logging_steps 1 --save_strategy no --report_to none "${device[@]}" "$@"
}

say "packed: several samples a row"
train packed --use_packed_ds True
say "padded: one sample a row, 8 rows a batch"
train padded --use_packed_ds False --per_device_train_batch_size 8

"$PY" -m train.quickstart compare "$WORK_DIR/packed" "$WORK_DIR/padded"
