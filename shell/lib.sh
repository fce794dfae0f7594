# shellcheck shell=bash disable=SC2034  # variables are for the scripts that source it
# Shared by the scripts in this folder: where the repository is, and a Python that has it installed.
# Source it: . "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
#
#   INTERNVL_PACK_PYTHON   use this interpreter as it is, and install nothing
#   INTERNVL_PACK_VENV     where the virtual environment is made (default: .venv in the repository)
#   PYTHON                 interpreter that makes it (default: python3)

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# Without a GPU. On PyPI torch is the CUDA build of 5 GB, also where there is no GPU, and torchvision is made for it.
CPU_TORCH="torch==2.13.0+cpu" TORCHVISION="0.28.0" CPU_INDEX="https://download.pytorch.org/whl/cpu"

# What pip installs here has no byte code but what first imports write; without it each process compiles torch anew.
unset PYTHONDONTWRITEBYTECODE

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# Number of NVIDIA GPUs that can be used, 0 without any.
count_gpus() {
  { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU ' || true
}

# Changes whenever an installation would: dependencies, interpreter, kind of torch, place of the repository.
install_key() {
  { cat "$ROOT/pyproject.toml" "$ROOT/shell/lib.sh" && "$1" --version && echo "$2 $ROOT"; } | cksum | tr -d ' '
}

# Sets $PY to an interpreter with the package and its development tools. Quick when nothing has changed.
ensure_python() {
  if [ -n "${INTERNVL_PACK_PYTHON:-}" ]; then
    PY="$INTERNVL_PACK_PYTHON"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    "$PY" -c 'import sys' || die "INTERNVL_PACK_PYTHON=$PY does not run"
    return
  fi
  local base="${PYTHON:-python3}" venv="${INTERNVL_PACK_VENV:-$ROOT/.venv}" torch="$CPU_TORCH" key
  command -v "$base" >/dev/null || die "$base is not installed; Python 3.10 or newer is needed"
  "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    die "$base is $("$base" --version 2>&1); Python 3.10 or newer is needed (set PYTHON to one)"
  if [ "$(count_gpus)" -gt 0 ]; then torch=""; fi
  PY="$venv/bin/python"
  key="$(install_key "$base" "$torch")"
  if [ -x "$PY" ] && [ "$(cat "$venv/.installed" 2>/dev/null)" = "$key" ]; then return; fi

  (
    # Two scripts at once: the second waits, and finds the work done.
    if command -v flock >/dev/null; then flock 9; fi
    if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$key" ] && [ -x "$PY" ]; then exit 0; fi
    say "installing into $venv (once; some minutes at most) ..."
    if ! "$PY" -c 'import pip' >/dev/null 2>&1; then
      rm -rf "$venv"
      "$base" -m venv "$venv" || die "could not make $venv; on Debian: apt install python3-venv"
    fi
    rm -f "$venv/.installed"
    # Byte code is made by the first import of what is used: of all that is installed it takes half a minute.
    local pip=("$PY" -m pip install -q --no-compile --disable-pip-version-check)
    if ! { { [ -z "$torch" ] || "${pip[@]}" "$torch" || "${pip[@]}" --index-url "$CPU_INDEX" "$torch"; } &&
      "${pip[@]}" ${torch:+"$torch"} -e "${ROOT}[dev]"; } >"$venv/install.log" 2>&1; then
      grep -v 'is ignored' "$venv/install.log" | tail -n 25 >&2
      die "the installation failed; all of pip's output is in $venv/install.log"
    fi
    printf '%s' "$key" >"$venv/.installed"
  ) 9>"${venv%/}.lock"
}

# Environment of a run that trains a tiny model here; sets $ranks, $width and the array device, finetune.py's options.
prepare_quickstart() {
  export HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS="${PYTHONWARNINGS:-ignore}"
  local gpus
  gpus="$(count_gpus)"
  if [ "$gpus" -gt 0 ]; then
    ranks=$((gpus < 2 ? gpus : 2))
    device=(--bf16 True)
    width=256 # heads of 64, which every attention kernel takes
  else
    ranks=2
    device=(--use_cpu True)
    width=128
    export DS_ACCELERATOR=cpu
  fi
}
