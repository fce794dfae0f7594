"""Runs that are told to save and stop, and go on: real DeepSpeed runs on CPU, by each launcher and signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from factory import write_jsonl

from train.environment import INTERRUPTED
from train.interruption import STOP_FILE, StopRequest
from train.sample_log import FOLDER, read_sample_log

ROOT = Path(__file__).resolve().parents[1]
STEPS = 30
PDSH = f"""#!{sys.executable}
import subprocess, sys
place = sys.argv.index("-w") + 1
hosts, command = sys.argv[place].split(","), " ".join(sys.argv[place + 1 :])
runs = [subprocess.Popen(["bash", "-c", command.replace("%n", str(i))]) for i in range(len(hosts))]
sys.exit(max(run.wait() for run in runs))
"""
OPTIONS = ["--force_image_size", "56", "--dynamic_image_size", "True", "--num_lanes", "4", "--use_cpu", "True"]
OPTIONS += ["--bf16", "False", "--save_steps", "1000", "--warmup_steps", "0", "--report_to", "none"]
OPTIONS += ["--grad_checkpoint", "False", "--check_isolation", "False", "--log_sample_ids", "True"]
OPTIONS += ["--max_steps", str(STEPS), "--lr_scheduler_type", "linear", "--learning_rate", "1e-3"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    from internvl_pack.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("stop")
    write_jsonl(folder, 300)
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


def write_tool(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def start(made: Path, out: Path, script: str, *options: str, **env: str) -> subprocess.Popen:
    """A launcher of shell/ on two processes; its output goes to OUT.log."""
    settings = {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")},
        "INTERNVL_PACK_PYTHON": sys.executable,
        "MODEL": str(made / "model"),
        "META": str(made / "meta.json"),
        "OUTPUT_DIR": str(out),
        "MAX_PACKED_TOKENS": "520",
        "NUM_IMAGES_EXPECTED": "24",
        "GLOBAL_PACKS": "4",
        "WORKERS": "0",
        "GPUS": "2",
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        **env,
    }
    with open(out.with_suffix(".log"), "ab") as log:
        command = ["bash", str(ROOT / "shell" / script), *OPTIONS, *options]
        return subprocess.Popen(command, env=settings, stdout=log, stderr=log, start_new_session=True)


def told(out: Path) -> str:
    return out.with_suffix(".log").read_text()


def steps_made(out: Path) -> int:
    path = out / FOLDER / "rank00000.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def wait_for_steps(run: subprocess.Popen, out: Path, more: int) -> int:
    """Until the run has made `more` steps than were made when it began."""
    first, deadline = steps_made(out), time.monotonic() + 200
    while steps_made(out) < first + more and time.monotonic() < deadline:
        assert run.poll() is None, told(out)[-4000:]
        time.sleep(0.05)
    return steps_made(out)


def saved_steps(out: Path) -> list[int]:
    return sorted(int(path.parent.name.partition("-")[2]) for path in out.glob("checkpoint-*/packing_state.json"))


def losses(out: Path) -> dict[int, float]:
    state = json.loads((out / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def test_a_run_stopped_by_signals_and_by_a_file_gives_the_samples_and_losses_of_an_unbroken_one(made, tmp_path):
    whole, out = tmp_path / "whole", tmp_path / "run"
    run = start(made, whole, "train_single_node.sh")
    assert run.wait(timeout=280) == 0, told(whole)[-4000:]

    # SIGUSR1 to the script, which hands it to the launcher, which hands it to its ranks.
    run = start(made, out, "train_single_node.sh")
    reached = wait_for_steps(run, out, 3)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(timeout=100) == INTERRUPTED, told(out)[-4000:]
    (first,) = saved_steps(out)
    assert reached <= first < STEPS
    assert f"stopped by SIGUSR1 after step {first}" in told(out)
    assert "Traceback" not in told(out)
    assert not (out / "model.safetensors").exists(), "it has not ended"

    # deepspeed's launcher on two machines, which cannot be told: the script leaves a file, which goes when it was seen.
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("# two machines\nnode1 slots=1\n\nnode2 slots=1\n")
    write_tool(tmp_path / "bin" / "pdsh", PDSH)
    local = {"HOSTFILE": str(hosts), "DEEPSPEED_ARGS": "--master_addr 127.0.0.1 --no_ssh_check", "GPUS": ""}
    run = start(made, out, "train_deepspeed.sh", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", **local)
    wait_for_steps(run, out, 3)
    run.send_signal(signal.SIGUSR1)
    assert run.wait(timeout=100) == INTERRUPTED, told(out)[-4000:]
    assert f"stopped by the file {STOP_FILE}" in told(out)
    assert not (out / STOP_FILE).exists()
    second = saved_steps(out)[-1]
    assert second > first

    # SIGTERM to every process of the run at once, its readers included, as a scheduler does it.
    run = start(made, out, "train_single_node.sh", WORKERS="2")
    wait_for_steps(run, out, 3)
    for pid in family(run.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.wait(timeout=100) == INTERRUPTED, told(out)[-4000:]
    assert "stopped by SIGTERM" in told(out)
    last = saved_steps(out)[-1]
    assert second < last < STEPS

    samples, expected = read_sample_log(out), read_sample_log(whole)
    assert samples == {step: expected[step] for step in range(1, last + 1)}
    assert losses(out / f"checkpoint-{last}") == {step: losses(whole)[step] for step in range(1, last + 1)}


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
    code = "import time; from internvl_pack.signals import obey_only_the_parent as obey; obey(); obey(); "
    code += "print('ready', flush=True); time.sleep(60)"
    reader = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT, text=True)
    assert reader.stdout is not None and reader.stdout.readline() == "ready\n"
    for name in ("TERM", "USR1", "TERM"):
        subprocess.run(["sh", "-c", f"kill -{name} {reader.pid}; :"], check=True)
    with pytest.raises(subprocess.TimeoutExpired):
        reader.wait(timeout=0.5)
    reader.terminate()
    assert reader.wait(timeout=10) == 0
