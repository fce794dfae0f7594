#!/usr/bin/env bash
# Twenty steps of train/finetune.py on one GPU: flash-attn under DeepSpeed ZeRO-1, bf16, packed demo data.
#   bash benchmarks/gpu_finetune.sh [flash_attn|varlen] [work dir]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kernel="${1:-flash_attn}"
work="${2:-work_dirs/gpu_finetune}"
meta=shell/data/quickstart.json
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$work"
# Heads of 64: what every kernel takes.
python3 train/make_tiny_model.py --meta_path "$meta" --output_dir "$work/tiny" --hidden_size 256
python3 -m torch.distributed.run --standalone --nproc_per_node 1 train/finetune.py \
  --model_name_or_path "$work/tiny" --meta_path "$meta" --output_dir "$work/run" --use_packed_ds True \
  --attn_kernel "$kernel" --deepspeed zero_stage1 --bf16 True --max_steps 20 --force_image_size 56 \
  --dynamic_image_size True --use_thumbnail True --max_packed_tokens 2048 --num_images_expected 40 \
  --learning_rate 2e-3 --logging_steps 1 --save_strategy no --report_to none --dataloader_num_workers 2 \
  --check_isolation True
python3 -c "import json,sys; s=json.load(open(sys.argv[1])); print({k: s[k] for k in ('steps','attn_kernel','dtype','zero_stage','loss_first','loss_last','tokens_per_s','token_fill')})" "$work/run/train_summary.json"
