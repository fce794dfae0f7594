"""How reader processes end."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Garbage in a cycle, as trainers leave it: it is collected while the interpreter ends.
LEFT_ALONE = """
from torch.utils.data import DataLoader
from internvl_pack.stream.worker import ReaderProcesses
batches = ReaderProcesses(DataLoader(range(8), num_workers=1, persistent_workers=True))
next(batches)
batches.itself = batches
del batches
"""


@pytest.mark.slow
def test_a_program_ends_though_its_readers_wait_for_more_work():
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
