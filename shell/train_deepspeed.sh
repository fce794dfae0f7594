#!/usr/bin/env bash
# Train with the deepspeed launcher: on this machine, or on those of a hostfile, reached by ssh through pdsh.
#   HOSTFILE=hosts.txt bash shell/train_deepspeed.sh          lines of the hostfile: "node1 slots=8"
#   GPUS=8 bash shell/train_deepspeed.sh                      this machine alone
# Settings as in recipe.sh, further options as arguments. The repository, its Python and OUTPUT_DIR must be at the same paths on all
# machines. DEEPSPEED_ARGS: options of the launcher (--include node1:0,1 --master_port 29501 --no_ssh_check ...).
# SIGTERM or SIGUSR1 to this script saves a checkpoint and ends with status 75; run it again to go on.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# shellcheck source=shell/recipe.sh
. "$ROOT/shell/recipe.sh"

HOSTFILE="${HOSTFILE:-}"
DEEPSPEED_ARGS="${DEEPSPEED_ARGS:-}"

# count_slots FILE: processes that a hostfile starts; blank lines and comments aside, a line is "name slots=N".
count_slots() {
  local line total=0
  while IFS= read -r line || [ -n "$line" ]; do
    line="${line%%#*}"
    [ -n "${line//[[:space:]]/}" ] || continue
    [[ "$line" =~ ^[[:space:]]*[^[:space:]]+[[:space:]]+slots=([1-9][0-9]*)[[:space:]]*$ ]] ||
      die "HOSTFILE=$1: '$line' is not of the form 'name slots=8'"
    total=$((total + BASH_REMATCH[1]))
  done <"$1"
  ((total > 0)) || die "HOSTFILE=$1: no machine in it"
  echo "$total"
}

ensure_python
cd "$ROOT"
if [ -n "$HOSTFILE" ]; then
  [ -f "$HOSTFILE" ] || die "HOSTFILE=$HOSTFILE: no such file"
  slots="$(count_slots "$HOSTFILE")"
  world="${GPUS:-$slots}" # fewer where DEEPSPEED_ARGS leaves some out
  launcher=(--hostfile "$HOSTFILE")
else
  world="${GPUS:-$(count_gpus)}"
  ((world > 0)) || die "no GPU found; set GPUS to the number of processes to train on a CPU, or HOSTFILE"
  launcher=(--hostfile /dev/null --num_gpus "$world")
fi
finetune_arguments "$world"
# A port of its own for each run on this machine; MASTER_PORT sets it. With a hostfile it must be free on the first machine.
launcher+=(--master_port "${MASTER_PORT:-$((20000 + $$ % 20000))}")
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}" PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

# The launcher kills its ranks on any signal, and has no way to reach those of other machines: the run looks for this file.
ask_to_stop() { : >"$OUTPUT_DIR/STOP"; }

# shellcheck disable=SC2086
run_logged "$OUTPUT_DIR/logs/train.log" "$PY" -m deepspeed.launcher.runner "${launcher[@]}" $DEEPSPEED_ARGS \
  --no_local_rank train/finetune.py "${ARGUMENTS[@]}" "$@"
