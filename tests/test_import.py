"""Importing the package is importing torch: what else it needs is imported where it is used."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Packages that cost 0.1 to 10 s, and that a loader over an annotation file does not need.
HEAVY = {
    "accelerate",
    "datasets",
    "deepspeed",
    "matplotlib",
    "pandas",
    "peft",
    "pyarrow",
    "tokenizers",
    "transformers",
    "wandb",
    "webdataset",
}
HELP = """
import contextlib, io
from internvl_pack.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main(["--help"])
"""


def imported_by(code: str) -> set[str]:
    program = f"import json, sys\n{code}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(json.loads(done.stdout))


def test_public_names_bring_torch_and_nothing_else_that_is_slow():
    found = imported_by("import internvl_pack\nfor name in internvl_pack.__all__: getattr(internvl_pack, name)")
    assert "torch" in found
    assert found & HEAVY == set()


@pytest.mark.parametrize(
    "code",
    [
        "import internvl_pack",
        "from internvl_pack import PackingConfig, UserError, SampleError",
        "import internvl_pack.packing.packer",
        "import internvl_pack.survey.workers",  # what each process of --workers imports
        HELP,
    ],
)
def test_planning_and_help_work_without_torch(code):
    assert imported_by(code) & {"torch", *HEAVY} == set()
