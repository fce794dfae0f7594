"""Fixtures shared by the whole suite: the demo data and a tokenizer trained on it."""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if "INTERNVL_PACK_CACHE" not in os.environ:  # surveys of test data do not belong in the user's cache
    os.environ["INTERNVL_PACK_CACHE"] = tempfile.mkdtemp(prefix="internvl-pack-tests-")
    atexit.register(shutil.rmtree, os.environ["INTERNVL_PACK_CACHE"], ignore_errors=True)

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "shell" / "data" / "demo"
SHARED = ROOT.parent / "shared"


# Files of some long tests. They come first, so that no worker is left with one while the other has nothing to do.
LONGEST = ("resume", "sharding", "compiled", "stop", "in_batch", "deepspeed", "sequence_parallel")
LONGEST += ("evaluation", "lora", "examples", "ranks_and_workers", "preset", "launchers", "zero3", "experts")
# What a file of tests that starts processes or compiles has in it.
STARTS = re.compile(
    r"subprocess|multiprocessing|num_workers|workers=|\"--workers\"|compile|deepspeed|finetune|launched"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="only files of tests that start no process and compile nothing"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if (
        not config.getoption("--fast")
        or collection_path.suffix != ".py"
        or not collection_path.name.startswith("test_")
    ):
        return None
    return bool(STARTS.search(collection_path.read_text(encoding="utf-8"))) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path_factory, monkeypatch):
    """What one test surveys, another must not find."""
    monkeypatch.setenv("INTERNVL_PACK_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(autouse=True)
def logs_reach_the_tests():
    """`finetune` takes the logs for itself; a test after it in the same process wants to see them again."""
    for name in ("internvl_pack", "train"):
        logging.getLogger(name).propagate = True
        logging.getLogger(name).setLevel(logging.NOTSET)  # a rank but the first tells errors alone


@pytest.fixture(scope="session")
def demo_dir() -> Path:
    return DEMO


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The hostile cases and larger data kept beside the repository; tests that read it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared folder beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def tokenizer():
    from internvl_pack.testing.tiny import conversation_texts, tiny_tokenizer

    return tiny_tokenizer(conversation_texts(DEMO / "demo.jsonl"))
