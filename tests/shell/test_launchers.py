"""The launchers: two torchrun agents on loopback for real, Slurm against stand-ins, settings and exit status."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.launched import launcher_settings, made_in

from train.environment import free_port
from train.options import parse
from train.preference import objective_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "shell").glob("*.sh"))
TINY_OPTIONS = ["--force_image_size", "56", "--use_cpu", "True", "--bf16", "False", "--max_steps", "2000"]
TINY_OPTIONS += ["--save_strategy", "no", "--warmup_steps", "0", "--report_to", "none", "--grad_checkpoint", "False"]


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    return made_in(tmp_path_factory.mktemp("launchers"), tokenizer, 40)


def test_two_nodes_on_loopback_train_as_one_world_and_stop_together_when_one_is_told_to(made, tmp_path):
    out = tmp_path / "run"
    world = {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GPUS_PER_NODE": "1"}
    command = ["bash", str(ROOT / "shell" / "train_multi_node.sh"), *TINY_OPTIONS, "--log_sample_ids", "True"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [
        subprocess.Popen(command, env=launcher_settings(made, out, NODE_RANK=str(rank), **world), **pipes)
        for rank in range(2)
    ]
    deadline = time.monotonic() + 240
    seen = out / "sample_ids" / "rank00001.jsonl"
    while (not seen.exists() or len(seen.read_text().splitlines()) < 3) and time.monotonic() < deadline:
        assert nodes[0].poll() is None, nodes[0].communicate()[0][-3000:]
        time.sleep(0.05)
    nodes[1].send_signal(signal.SIGUSR1)
    outputs = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [75, 75], outputs[0][-3000:]
    assert "stopped by SIGUSR1" in outputs[0] and "Traceback" not in outputs[0] + outputs[1]
    (state,) = out.glob("checkpoint-*/packing_state.json")
    assert json.loads(state.read_text())["world_size"] == 2
    assert (out / "logs" / "node0.log").stat().st_size > 0


SRUN = f"""#!{sys.executable}
import json, os, signal, sys, time
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda *_: sys.exit(75))
with open(os.environ["SEEN"], "w") as file:
    json.dump(sys.argv[1:], file)
os.rename(os.environ["SEEN"], os.environ["SEEN"] + ".json")
time.sleep(30)
"""


@pytest.mark.parametrize(
    ("number", "env", "requeued"),
    [
        (signal.SIGUSR1, {"SLURM_JOB_ID": "77"}, True),
        (signal.SIGTERM, {"SLURM_JOB_ID": "77"}, False),  # cancelled
        (signal.SIGUSR1, {"SLURM_JOB_ID": "77", "REQUEUE": "0"}, False),
        (signal.SIGUSR1, {}, False),  # srun from a login node
    ],
)
def test_a_slurm_job_is_requeued_when_the_signal_before_its_time_limit_stopped_it(number, env, requeued, tmp_path):
    """As sbatch runs it: a copy of the script from a folder of Slurm's, submitted from the repository."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/scontrol\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    spool = tmp_path / "slurm_script"
    shutil.copy(ROOT / "shell" / "train_slurm.sh", spool)
    job = {"SLURM_SUBMIT_DIR": str(ROOT), "SEEN": str(tmp_path / "srun"), "GPUS": "2", "GPUS_PER_NODE": "2", **env}
    job["PATH"] = f"{tools}:{os.environ['PATH']}"
    run = subprocess.Popen(["bash", str(spool)], env=launcher_settings(tmp_path, tmp_path / "out", **job), cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "srun.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # bash is on its way into `wait`: what comes right then it handles when the command has ended
    run.send_signal(number)
    assert run.wait(timeout=20) == 75
    calls = (tmp_path / "scontrol").read_text().splitlines() if (tmp_path / "scontrol").exists() else []
    assert ("requeue 77" in calls) == requeued
    started = json.loads((tmp_path / "srun.json").read_text())
    assert ("--signal=USR1@300" in started) == ("SLURM_JOB_ID" not in env), "inside a job it is the job's own"


def test_slurm_is_asked_for_the_signal_and_for_requeueing():
    lines = (ROOT / "shell" / "train_slurm.sh").read_text().splitlines()
    directives = [line for line in lines[1 : lines.index("set -euo pipefail")] if line.startswith("#SBATCH")]
    assert directives == ["#SBATCH --signal=B:USR1@300", "#SBATCH --requeue", "#SBATCH --open-mode=append"]


def test_no_launcher_has_a_fixed_port():
    for script in SCRIPTS:
        text = script.read_text()
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        assert "29500" not in code and "--master_port=" not in code, script.name


def test_every_script_stops_at_errors():
    sourced = {"lib.sh", "recipe.sh"}
    assert all("set -euo pipefail" in script.read_text() for script in SCRIPTS if script.name not in sourced)


@pytest.mark.parametrize(("last", "status"), [("exit 7", 7), ("exit 0", 0), ("kill -KILL $$", 137)])
def test_the_exit_status_passes_through_the_log(last, status, tmp_path):
    code = f'set -euo pipefail; . "{ROOT}/shell/lib.sh"; . "{ROOT}/shell/recipe.sh"; '
    code += f"run_logged {tmp_path}/logs/a.log bash -c 'echo out; echo err >&2; {last}'"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == status
    assert sorted(done.stdout.split()) == sorted((tmp_path / "logs" / "a.log").read_text().split()) == ["err", "out"]


@pytest.mark.parametrize(
    ("script", "env", "message"),
    [
        ("train_deepspeed.sh", {"HOSTFILE": "/nowhere/hosts"}, "HOSTFILE=/nowhere/hosts: no such file"),
        ("train_deepspeed.sh", {"HOSTFILE": "@node1 8"}, "'node1 8' is not of the form 'name slots=8'"),
        ("train_deepspeed.sh", {"HOSTFILE": "@node1 slots=0"}, "is not of the form"),
        ("train_deepspeed.sh", {"HOSTFILE": "@# none"}, "no machine in it"),
        ("train_deepspeed.sh", {"HOSTFILE": "@a slots=2\nb slots=4"}, "GLOBAL_PACKS=4 is not a multiple of 6 GPUs"),
        ("train_single_node.sh", {"GPUS": "3"}, "GLOBAL_PACKS=4 is not a multiple of 3 GPUs: set it to 6"),
        (
            "train_single_node.sh",
            {"GPUS": "4", "SEQUENCE_PARALLEL_SIZE": "3"},
            "SEQUENCE_PARALLEL_SIZE=3 does not divide 4 GPUs",
        ),
        (
            "train_single_node.sh",
            {"GPUS": "12", "SEQUENCE_PARALLEL_SIZE": "2"},
            "GLOBAL_PACKS=4 is not a multiple of 6 groups of 2 GPUs: set it to 6",
        ),
        ("train_single_node.sh", {"GPUS": "2", "STAGE": "stage7"}, "STAGE=stage7 is unknown"),
        ("train_multi_node.sh", {"NNODES": "2"}, "NODE_RANK is not set"),
        ("train_slurm.sh", {"GPUS": "3", "GPUS_PER_NODE": "2"}, "GPUS=3 is not a multiple of GPUS_PER_NODE=2"),
    ],
)
def test_a_wrong_setting_is_one_line_and_a_failure(script, env, message, made, tmp_path):
    if env.get("HOSTFILE", "").startswith("@"):
        (tmp_path / "hosts").write_text(env["HOSTFILE"][1:])
        env = env | {"HOSTFILE": str(tmp_path / "hosts")}
    command = ["bash", str(ROOT / "shell" / script)]
    done = subprocess.run(
        command, env=launcher_settings(made, tmp_path, **env), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr


@pytest.mark.parametrize(
    ("world", "size", "accumulation"), [("8", "1", "8"), ("8", "4", "32"), ("8", "8", "64"), ("64", "8", "8")]
)
def test_gpus_that_share_a_row_leave_the_packs_of_a_step_what_they_were(world, size, accumulation):
    code = f'. "{ROOT}/shell/lib.sh"; . "{ROOT}/shell/recipe.sh"; finetune_arguments {world}; echo "${{ARGUMENTS[@]}}"'
    env = {**os.environ, "SEQUENCE_PARALLEL_SIZE": size, "SEQUENCE_PARALLEL_MODE": "ring", "GLOBAL_PACKS": "64"}
    done = subprocess.run(["bash", "-euc", code], env=env, capture_output=True, text=True, timeout=20, check=True)
    assert f"--gradient_accumulation_steps {accumulation} " in done.stdout
    mode = "" if size == "1" else " --sequence_parallel_mode ring"
    assert done.stdout.endswith(f"--sequence_parallel_size {size}{mode}\n")


@pytest.mark.parametrize(
    ("stage", "objective"), [("stage1", "sft"), ("stage1.5", "sft"), ("stage2", "sft"), ("mpo", "mpo"), ("dpo", "dpo")]
)
def test_each_stage_is_options_that_go_together(stage, objective):
    code = (
        f'. "{ROOT}/shell/lib.sh"; . "{ROOT}/shell/recipe.sh"; finetune_arguments 1; printf "%s\\n" "${{ARGUMENTS[@]}}"'
    )
    env = {**os.environ, "STAGE": stage, "DEEPSPEED": ""}
    done = subprocess.run(["bash", "-euc", code], env=env, capture_output=True, text=True, timeout=20, check=True)
    words = done.stdout.split("\n")[:-1]
    place = words.index("--deepspeed")
    _, data_args, args = parse([*words[:place], *words[place + 2 :], "--use_cpu", "True"])
    assert objective_of(data_args.objective, args) == objective


def test_a_failing_run_keeps_its_exit_status_through_the_log(made, tmp_path):
    command = ["bash", str(ROOT / "shell" / "train_single_node.sh"), "--conv_style", "nonsense", *TINY_OPTIONS]
    env = launcher_settings(made, tmp_path / "run", GPUS="1")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    log = (tmp_path / "run" / "logs" / "train.log").read_text()
    assert [line for line in log.splitlines() if "conv_style" in line]
    assert "Traceback" not in log and "ChildFailedError" not in log, "one line is enough"


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


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--max_steps", 1)])
def test_the_quickstart_says_what_it_is_before_it_does_anything(argument, code):
    nothing = os.environ | {"INTERNVL_PACK_PYTHON": "/nonexistent"}
    command = ["bash", str(ROOT / "shell" / "quickstart.sh"), argument]
    result = subprocess.run(command, env=nothing, capture_output=True, text=True, timeout=60)
    assert result.returncode == code
    assert result.stdout.startswith("From a fresh clone") and "bash shell/quickstart.sh" in result.stdout
    assert result.stderr == (
        "" if code == 0 else "error: quickstart.sh takes --family NAME and no other arguments: --max_steps\n"
    )


def test_the_quickstart_refuses_a_family_that_it_does_not_make():
    command = ["bash", str(ROOT / "shell" / "quickstart.sh"), "--family", "gemma3"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.startswith("error: quickstart.sh --family gemma3: use internvl, qwen2_5_vl")
