"""The launchers, started for real: two torchrun agents on loopback, and Slurm's tasks from a small fake srun."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from factory import write_jsonl

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "shell").glob("*.sh"))
TINY_OPTIONS = ["--force_image_size", "56", "--use_cpu", "True", "--bf16", "False", "--max_steps", "2"]
TINY_OPTIONS += ["--save_strategy", "no", "--warmup_steps", "0", "--report_to", "none", "--grad_checkpoint", "False"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    from internvl_pack.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("launchers")
    write_jsonl(folder, 40)
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


def settings(made: Path, out: Path, **extra: str) -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")},
        "INTERNVL_PACK_PYTHON": sys.executable,
        "MODEL": str(made / "model"),
        "META": str(made / "meta.json"),
        "OUTPUT_DIR": str(out),
        "MAX_PACKED_TOKENS": "512",
        "NUM_IMAGES_EXPECTED": "24",
        "GLOBAL_PACKS": "4",
        "WORKERS": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "DS_ACCELERATOR": "cpu",
        **extra,
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def trained(out: Path) -> dict:
    return json.loads((out / "train_summary.json").read_text())


def test_two_nodes_on_loopback_train_as_one_world(made, tmp_path):
    out = tmp_path / "run"
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            ["bash", str(ROOT / "shell" / "train_multi_node.sh"), *TINY_OPTIONS],
            env=settings(
                made, out, NNODES="2", NODE_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GPUS_PER_NODE="1"
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [node.communicate(timeout=280)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][-3000:]
    assert (trained(out)["ranks"], trained(out)["steps"]) == (2, 2)
    assert (out / "logs" / "node0.log").stat().st_size > 0


def test_slurm_tasks_train_as_one_world(made, tmp_path):
    """A fake srun starts --ntasks tasks with Slurm's variables; scontrol names the first host."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
    (tools / "srun").write_text(
        f"""#!{sys.executable}
import os, subprocess, sys
options = [a for a in sys.argv[1:] if a.startswith("-")]
tasks = int(next(a for a in options if a.startswith("--ntasks=")).split("=")[1])
command = sys.argv[sys.argv.index("bash"):]
env = os.environ | {{"SLURM_NTASKS": str(tasks), "SLURM_JOB_NODELIST": "node[0-0]"}}
runs = [subprocess.Popen(command, env=env | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}) for i in range(tasks)]
sys.exit(max(run.wait() for run in runs))
"""
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)
    out = tmp_path / "run"
    env = settings(made, out, GPUS="2", GPUS_PER_NODE="2", PARTITION="gpu", PATH=f"{tools}:{os.environ['PATH']}")
    env["MASTER_PORT"] = str(free_port())
    command = ["bash", str(ROOT / "shell" / "train_slurm.sh"), *TINY_OPTIONS]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert (trained(out)["ranks"], trained(out)["steps"]) == (2, 2)


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        ("train_single_node.sh", {"GPUS": "3"}, "GLOBAL_PACKS=4 is not a multiple of 3 GPUs: set it to 6"),
        ("train_single_node.sh", {"GPUS": "2", "STAGE": "stage7"}, "STAGE=stage7 is unknown"),
        ("train_multi_node.sh", {"NNODES": "2"}, "NODE_RANK is not set"),
        ("train_slurm.sh", {"GPUS": "3", "GPUS_PER_NODE": "2"}, "GPUS=3 is not a multiple of GPUS_PER_NODE=2"),
    ],
)
def test_a_wrong_setting_is_one_line_and_a_failure(script, env, message, made, tmp_path):
    command = ["bash", str(ROOT / "shell" / script)]
    done = subprocess.run(
        command, env=settings(made, tmp_path, **env), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr


def test_a_failing_run_keeps_its_exit_status_through_the_log(made, tmp_path):
    command = ["bash", str(ROOT / "shell" / "train_single_node.sh"), "--conv_style", "nonsense", *TINY_OPTIONS]
    env = settings(made, tmp_path / "run", GPUS="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "conv_style" in (tmp_path / "run" / "logs" / "train.log").read_text()


def test_scripts_are_clean_for_shellcheck():
    tool = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("needs shellcheck")
    done = subprocess.run(
        [tool, "-x", "-P", "SCRIPTDIR", "-P", str(ROOT), *map(str, SCRIPTS), str(ROOT / ".ci" / "run")],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT / "shell",
    )
    assert done.returncode == 0, done.stdout
