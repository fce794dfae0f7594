# shellcheck shell=bash disable=SC2034  # variables are for the scripts that source it
# Settings shared by the launchers in this folder. Source it, then call `finetune_arguments`.
#
#   STAGE   stage1 | stage1.5 | stage2   which parts train and how (as in InternVL2.5 and InternVL3)
#           mpo | dpo                    on pairs of answers, after these (docs/preference.md)
#   MODEL   checkpoint folder or hub name (native format)          META   meta file of the data
#   OUTPUT_DIR   where checkpoints go; a run that finds one there goes on from it
#   MAX_PACKED_TOKENS, NUM_IMAGES_EXPECTED   budgets of a row: 16384/48 fits one 80 GB GPU with checkpointing
#   GLOBAL_PACKS   packs in one optimizer step over all GPUs; gradient accumulation follows from it
#   SEQUENCE_PARALLEL_SIZE, SEQUENCE_PARALLEL_MODE   GPUs that share a row, and how (docs/sequence-parallel.md); 1: none do
#   DEEPSPEED   zero_stage1 | zero_stage2 | zero_stage3 | zero_stage3_offload | a config file | fsdp2, torch's in its place
#   any further arguments of the launcher go to train/finetune.py and win over the recipe

INTERRUPTED=75 # exit status of a run that a signal stopped at a checkpoint

STAGE="${STAGE:-stage2}"
MODEL="${MODEL:-OpenGVLab/InternVL3-1B-hf}"
META="${META:-shell/data/demo/meta.json}"
OUTPUT_DIR="${OUTPUT_DIR:-work_dirs/$STAGE}"
MAX_PACKED_TOKENS="${MAX_PACKED_TOKENS:-16384}"
NUM_IMAGES_EXPECTED="${NUM_IMAGES_EXPECTED:-48}"
GLOBAL_PACKS="${GLOBAL_PACKS:-64}"
DEEPSPEED="${DEEPSPEED:-zero_stage1}"
WORKERS="${WORKERS:-4}"
SEQUENCE_PARALLEL_SIZE="${SEQUENCE_PARALLEL_SIZE:-1}"
SEQUENCE_PARALLEL_MODE="${SEQUENCE_PARALLEL_MODE:-}"

# finetune_arguments WORLD_SIZE: sets the array ARGUMENTS.
finetune_arguments() {
  local world="$1" size="$SEQUENCE_PARALLEL_SIZE" readers
  [[ "$size" =~ ^[1-9][0-9]*$ ]] || die "SEQUENCE_PARALLEL_SIZE=$size: give the number of GPUs that share a row"
  if ((world % size)); then
    die "SEQUENCE_PARALLEL_SIZE=$size does not divide $world GPUs: set it to a divisor, or use another number of GPUs"
  fi
  readers=$((world / size)) # packs that are trained at the same time
  if ((GLOBAL_PACKS % readers)); then
    if ((size > 1)); then
      die "GLOBAL_PACKS=$GLOBAL_PACKS is not a multiple of $readers groups of $size GPUs: set it to $((((GLOBAL_PACKS + readers - 1) / readers) * readers))"
    fi
    die "GLOBAL_PACKS=$GLOBAL_PACKS is not a multiple of $world GPUs: set it to $((((GLOBAL_PACKS + world - 1) / world) * world))"
  fi
  case "$STAGE" in
    stage1) parts=(--freeze_llm True --freeze_backbone True --freeze_mlp False --learning_rate 2e-4 --weight_decay 0.05) ;;
    stage1.5) parts=(--freeze_llm True --freeze_backbone False --freeze_mlp False --learning_rate 1e-5 --weight_decay 0.05) ;;
    stage2) parts=(--freeze_llm False --freeze_backbone False --freeze_mlp False --learning_rate 4e-5 --weight_decay 0.01) ;;
    mpo | dpo) parts=(--objective "$STAGE" --freeze_llm False --freeze_backbone False --freeze_mlp False --learning_rate 2e-7 --weight_decay 0.05) ;;
    *) die "STAGE=$STAGE is unknown: use stage1, stage1.5, stage2, mpo or dpo" ;;
  esac
  local sharding=(--deepspeed "$DEEPSPEED")
  [ "$DEEPSPEED" != fsdp2 ] || sharding=(--sharding fsdp2)
  ARGUMENTS=(
    --model_name_or_path "$MODEL" --meta_path "$META" --output_dir "$OUTPUT_DIR" "${parts[@]}"
    --use_packed_ds True --max_packed_tokens "$MAX_PACKED_TOKENS" --num_images_expected "$NUM_IMAGES_EXPECTED"
    --dynamic_image_size True --use_thumbnail True --max_dynamic_patch 12 --loss_reduction square
    --per_device_train_batch_size 1 --gradient_accumulation_steps "$((GLOBAL_PACKS / readers))"
    --num_train_epochs 1 --lr_scheduler_type cosine --warmup_steps 0.03 --bf16 True --grad_checkpoint True
    --dataloader_num_workers "$WORKERS" "${sharding[@]}" --save_strategy steps --save_steps 200
    --save_total_limit 3 --logging_steps 1 --resume_from_checkpoint auto
    --sequence_parallel_size "$size"
  )
  if ((size > 1)); then ARGUMENTS+=(${SEQUENCE_PARALLEL_MODE:+--sequence_parallel_mode "$SEQUENCE_PARALLEL_MODE"}); fi
}

# run_logged LOG COMMAND...: shows and keeps the output, and returns the command's own status. SIGTERM, SIGUSR1 and Ctrl-C
# that reach this script are handed to the command at once (bash alone would wait for its end); SIGNALLED names the last.
run_logged() {
  local log="$1" logger out status again
  shift
  mkdir -p "$(dirname "$log")"
  exec {out}> >(exec tee -ai "$log")
  logger=$!
  SIGNALLED=""
  "$@" >&"$out" 2>&1 {out}>&- &
  COMMAND_PID=$!
  trap 'hand_on TERM' TERM
  trap 'hand_on USR1' USR1
  trap 'hand_on INT' INT
  status=0
  wait "$COMMAND_PID" || status=$?
  while [ "$status" -gt 128 ] && [ -n "$SIGNALLED" ]; do # a signal ends `wait`, the command may go on
    again=0
    wait "$COMMAND_PID" || again=$?
    if [ "$again" -eq 127 ]; then break; fi # it was the command's own end
    status="$again"
    if ! kill -0 "$COMMAND_PID" 2>/dev/null; then break; fi
  done
  trap - TERM USR1 INT
  exec {out}>&-
  wait "$logger" || true
  return "$status"
}

# hand_on SIGNAL: to the command of run_logged. A launcher may define `ask_to_stop` for commands that cannot take it.
hand_on() {
  SIGNALLED="$1"
  if [ "$1" != INT ] && declare -F ask_to_stop >/dev/null; then
    ask_to_stop
  else
    kill -s "$1" "$COMMAND_PID" 2>/dev/null || true
  fi
}
