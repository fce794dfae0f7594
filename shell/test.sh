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

# Tests of one file share what they set up, so a file stays on one worker; those with slow tests begin.
# "$@" comes last, so -n 0 undoes it.
exec "$PY" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
