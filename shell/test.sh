#!/usr/bin/env bash
# Set up and run the test suite. Arguments go to pytest: bash shell/test.sh tests/order -k seek
#   bash shell/test.sh --fast    what starts no process, compiles nothing and is not marked slow
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ensure_python
cd "$ROOT"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
if [ "$(count_gpus)" -eq 0 ]; then export DS_ACCELERATOR=cpu; fi

# transformers' processors need torchvision. Beside a torch without CUDA that of PyPI does not load, and transformers
# with it; so it lies apart, for the one test that asks for it (tests/helpers/answer.py).
if [ -z "${INTERNVL_PACK_PYTHON:-}" ] && ! "$PY" -c 'import torchvision' 2>/dev/null; then
  apart="${INTERNVL_PACK_VENV:-$ROOT/.venv}/torchvision-$TORCHVISION"
  if [ ! -d "$apart/torchvision" ] && ! "$PY" -m pip install -q --no-deps --no-compile --disable-pip-version-check \
    --target "$apart" "torchvision==$TORCHVISION" >"$apart.log" 2>&1; then
    say "torchvision cannot be installed ($apart.log): its test is skipped"
  fi
  if [ -d "$apart/torchvision" ]; then export INTERNVL_PACK_TORCHVISION="$apart"; fi
fi

# Tests of one file share what they set up, so a file stays on one worker; those with slow tests begin.
# "$@" comes last, so -n 0 undoes it.
exec "$PY" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
