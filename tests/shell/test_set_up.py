"""Setting up the environment: the interpreter that is used, and nothing done twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "script", ["shell/quickstart.sh", "shell/quickstart_mpo.sh", "shell/test.sh", "shell/lib.sh", ".ci/run"]
)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)


def call_lib(code: str, **env: str) -> subprocess.CompletedProcess:
    command = ["bash", "-c", f'set -euo pipefail; . "{ROOT}/shell/lib.sh"; {code}']
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60)


def test_set_up_takes_an_interpreter_that_is_given(tmp_path):
    done = call_lib("ensure_python; echo $PY", INTERNVL_PACK_PYTHON=sys.executable)
    assert done.stdout.strip() == sys.executable


def test_set_up_is_over_at_once_when_nothing_has_changed(tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    env = {"INTERNVL_PACK_VENV": str(venv), "PYTHON": sys.executable, "INTERNVL_PACK_PYTHON": ""}
    key = call_lib('torch="$CPU_TORCH"; [ "$(count_gpus)" -gt 0 ] && torch=""; install_key "$PYTHON" "$torch"', **env)
    (venv / ".installed").write_text(key.stdout)
    done = call_lib("ensure_python; echo $PY", **env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == str(venv / "bin" / "python")


def test_a_python_too_old_or_absent_is_said(tmp_path):
    done = call_lib("ensure_python", PYTHON="python9", INTERNVL_PACK_PYTHON="", INTERNVL_PACK_VENV=str(tmp_path / "v"))
    assert done.returncode == 1 and "python9 is not installed" in done.stderr
