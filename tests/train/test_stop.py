"""Runs that are told to save and stop, and go on: real DeepSpeed runs on CPU, by each launcher and signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.launched import launcher_settings, losses, made_in, steps_made

from train import finetune
from train.accounting import read_sample_log
from train.environment import INTERRUPTED
from train.interruption import STOP_FILE, StopRequest

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
tasks = int(next(a for a in sys.argv if a.startswith("--ntasks=")).split("=")[1])
command = sys.argv[sys.argv.index("train/finetune.py") - 1:]
env = os.environ | {{"SLURM_NTASKS": str(tasks)}}
runs = [subprocess.Popen(command, env=env | {{"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}) for i in range(tasks)]
for name in ("SIGUSR1", "SIGTERM"):
    signal.signal(getattr(signal, name), lambda number, frame: [run.send_signal(number) for run in runs])
sys.exit(max(run.wait() for run in runs))
"""
PDSH = f"""#!{sys.executable}
import subprocess, sys
place = sys.argv.index("-w") + 1
hosts, command = sys.argv[place].split(","), " ".join(sys.argv[place + 1 :])
runs = [subprocess.Popen(["bash", "-c", command.replace("%n", str(i))]) for i in range(len(hosts))]
sys.exit(max(run.wait() for run in runs))
"""
OPTIONS = ["--force_image_size", "56", "--dynamic_image_size", "True", "--use_cpu", "True"]
OPTIONS += ["--bf16", "False", "--save_steps", "1000", "--warmup_steps", "0", "--report_to", "none"]
OPTIONS += ["--grad_checkpoint", "False", "--check_isolation", "False", "--log_sample_ids", "True"]
OPTIONS += ["--max_steps", str(STEPS), "--lr_scheduler_type", "linear", "--learning_rate", "1e-3"]
SETTINGS = {"GPUS": "2", "MAX_PACKED_TOKENS": "520"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    return made_in(tmp_path_factory.mktemp("stop"), tokenizer, 240)


def write_tool(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(made: Path, out: Path, script: str, *options: str, **env: str) -> subprocess.Popen:
    """A launcher of shell/ on two processes; its output goes to OUT.log."""
    env = launcher_settings(made, out, **(SETTINGS | env))
    with open(out.with_suffix(".log"), "ab") as log:
        command = ["bash", str(ROOT / "shell" / script), *OPTIONS, *options]
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def told(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def wait_for_steps(run: subprocess.Popen, out: Path, more: int) -> int:
    """Until the run has made `more` steps than were made when it began."""
    first, deadline = steps_made(out), time.monotonic() + 200
    while steps_made(out) < first + more and time.monotonic() < deadline:
        assert run.poll() is None, told(out)[-4000:]
        time.sleep(0.05)
    return steps_made(out)


def saved_steps(out: Path) -> list[int]:
    return sorted(int(path.parent.name.partition("-")[2]) for path in out.glob("checkpoint-*/packing_state.json"))


def unbroken(made: Path, out: Path) -> None:
    """The same recipe in this process, one rank, without a stop."""
    code = (
        f'. "{ROOT}/shell/lib.sh"; . "{ROOT}/shell/recipe.sh"; finetune_arguments 1; printf "%s\\n" "${{ARGUMENTS[@]}}"'
    )
    env = launcher_settings(made, out, **SETTINGS)
    words = subprocess.run(
        ["bash", "-c", code], env=env, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    place = words.index("--deepspeed")
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    try:
        assert finetune.main([*words[:place], *words[place + 2 :], *OPTIONS]) == 0
    finally:
        os.environ.clear()
        os.environ.update(saved)


def test_a_run_stopped_by_signals_trains_the_samples_of_an_unbroken_one_with_its_losses(made, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    unbroken(made, whole)

    # A Slurm job: SIGUSR1 to its script, which hands it to srun, which hands it to its tasks.
    write_tool(tmp_path / "bin" / "srun", SRUN)
    write_tool(tmp_path / "bin" / "scontrol", f"#!/bin/sh\necho $* >>{tmp_path}/scontrol\necho 127.0.0.1\n")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    job = str(os.getpid())
    run = start(made, out, "train_slurm.sh", PATH=path, SLURM_JOB_ID=job, SLURM_JOB_NODELIST="node[0-0]")
    reached = wait_for_steps(run, out, 3)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(timeout=100) == INTERRUPTED, told(out)[-4000:]
    (first,) = saved_steps(out)
    assert reached <= first < STEPS
    assert f"stopped by SIGUSR1 after step {first}" in told(out)
    assert "Traceback" not in told(out)
    assert f"requeue {job}" in (tmp_path / "scontrol").read_text()
    assert not (out / "model.safetensors").exists(), "it has not ended"

    # deepspeed's launcher on two machines; SIGTERM to every process of the ranks at once, their readers included, as a
    # scheduler does it.
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("# two machines\nnode1 slots=1\n\nnode2 slots=1\n")
    write_tool(tmp_path / "bin" / "pdsh", PDSH)
    machines = {"HOSTFILE": str(hosts), "DEEPSPEED_ARGS": "--master_addr 127.0.0.1 --no_ssh_check", "GPUS": ""}
    run = start(made, out, "train_deepspeed.sh", PATH=path, WORKERS="1", **machines)
    wait_for_steps(run, out, 3)
    for pid in family(run.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.wait(timeout=100) == INTERRUPTED, told(out)[-4000:]
    assert "stopped by SIGTERM" in told(out)
    last = saved_steps(out)[-1]
    assert first + 3 <= last < STEPS

    samples, expected = read_sample_log(out), read_sample_log(whole)
    assert sorted(samples) == list(range(1, last + 1))
    assert all(sorted(samples[step]) == sorted(expected[step]) for step in samples)
    got = losses(out / f"checkpoint-{last}")
    assert sorted(got) == sorted(samples)
    assert got == pytest.approx({step: losses(whole)[step] for step in got}, rel=1e-4)


DEEPSPEED = f"""#!{sys.executable}
import os, sys, time
if sys.argv[1:2] == ["-c"]:
    sys.exit(0)
open(os.environ["OUTPUT_DIR"] + "/started", "w").close()
deadline = time.monotonic() + 30
while time.monotonic() < deadline and not os.path.exists(os.environ["OUTPUT_DIR"] + "/{STOP_FILE}"):
    time.sleep(0.05)
sys.exit(75)
"""


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_deepspeeds_launcher_is_not_signalled_the_run_finds_a_file(number, made, tmp_path):
    """Its launcher would kill the ranks; a stand-in for Python waits for the file as a run does."""
    out = tmp_path / "run"
    write_tool(tmp_path / "bin" / "python", DEEPSPEED)
    run = start(made, out, "train_deepspeed.sh", INTERNVL_PACK_PYTHON=str(tmp_path / "bin" / "python"))
    deadline = time.monotonic() + 30
    while not (out / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(timeout=20) == INTERRUPTED, told(out)


def family(pid: int) -> list[int]:
    """A process and all that descend from it; the script and the launcher, which hand signals on, are left out."""
    import psutil

    return [
        child.pid
        for child in psutil.Process(pid).children(recursive=True)
        if "train/finetune.py" in child.cmdline()[2:3]
    ]


def test_a_request_is_forgotten_outside_the_run(tmp_path):
    request = StopRequest(tmp_path, 0)
    before = signal.getsignal(signal.SIGUSR1)
    with request.listening():
        assert request.agree(None) == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert request.agree(None) == "SIGUSR1"
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_file_is_seen_once(tmp_path):
    (tmp_path / STOP_FILE).touch()
    assert StopRequest(tmp_path, 1).agree(None) == "", "only the first rank looks"
    assert StopRequest(tmp_path, 0).agree(None) == f"the file {STOP_FILE}"
    assert StopRequest(tmp_path, 0).agree(None) == ""


def test_a_reader_obeys_its_parent_alone():
    code = "import time; from internvl_pack.stream.worker import obey_only_the_parent as obey; obey(); obey(); "
    code += "print('ready', flush=True); time.sleep(60)"
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    for name in ("TERM", "USR1", "HUP", "INT", "TERM"):
        subprocess.run(["sh", "-c", f"kill -{name} {reader.pid}; :"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(timeout=0.5)
    reader.terminate()
    assert reader.wait(timeout=10) == 0
