"""Fixtures of the training program's tests: a tiny model, its data, and `finetune.py` in this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.factory import write_jsonl

from train import finetune
from train.environment import prepare_environment, shut_down

COUNT = 24


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer) -> Path:
    """A tiny model and 24 samples, one of them with an image that is none."""
    from internvl_pack.testing.tiny import save_tiny_checkpoint

    folder = tmp_path_factory.mktemp("made")
    write_jsonl(folder, COUNT)
    sorted((folder / "images").iterdir())[0].write_bytes(b"not an image")
    save_tiny_checkpoint(folder / "model", tokenizer)
    return folder


@pytest.fixture
def train(made, tmp_path, monkeypatch, caplog):
    """main() with tiny options -> its exit code; the environment is put back afterwards."""
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)

    def call(*options: str, out: Path = tmp_path) -> int:
        argv = ["--model_name_or_path", str(made / "model"), "--meta_path", str(made / "meta.json")]
        argv += ["--output_dir", str(out), "--force_image_size", "56", "--max_packed_tokens", "512"]
        argv += ["--max_seq_length", "512", "--num_images_expected", "16", "--use_cpu", "True", "--logging_steps", "1"]
        argv += ["--grad_checkpoint", "False", "--learning_rate", "1e-3", "--optim", "adamw_torch"]
        return finetune.main([*argv, *options])

    yield call
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture
def own_process():
    """The environment that no launcher has touched; put back afterwards, the process group left."""
    saved = os.environ.copy()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    prepare_environment()
    yield
    shut_down()
    os.environ.clear()
    os.environ.update(saved)
