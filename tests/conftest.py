"""Fixtures shared by the whole suite: the demo data and a tokenizer trained on it."""

from __future__ import annotations

import atexit
import gc
import itertools
import logging
import multiprocessing.util
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if "INTERNVL_PACK_CACHE" not in os.environ:  # surveys of test data do not belong in the user's cache
    os.environ["INTERNVL_PACK_CACHE"] = tempfile.mkdtemp(prefix="internvl-pack-tests-")
    atexit.register(shutil.rmtree, os.environ["INTERNVL_PACK_CACHE"], ignore_errors=True)

# A tenth of the suite's time was the collector's, over a million objects that tests import.
gc.disable()  # until they are
gc.set_threshold(20_000, 20, 20)

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "shell" / "data" / "demo"
SHARED = ROOT.parent / "shared"


# Events of the interpreter when it starts a process.
STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn")
AT_WORK = pytest.StashKey[bool]()  # whether a test runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast",
        action="store_true",
        help="leave out tests that are marked slow, and skip each that starts a process or compiles",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fast"):
        sys.modules.setdefault("torchao", None)  # only slow tests need it, and transformers imports it where it is


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files that are slow as a whole are not imported for --fast."""
    if config.getoption("--fast") and collection_path.name.startswith("test_"):
        return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    item.config.stash[AT_WORK] = True
    try:
        return (yield)
    finally:
        item.config.stash[AT_WORK] = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first, so that no worker is left with a long one at the end."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])
    if config.getoption("--fast"):
        left_out = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a process that runs tests; one that hands them to workers collects none."""
    gc.freeze()  # what was imported stays, and is not looked at again
    atexit.register(gc.unfreeze)
    gc.enable()
    if session.config.getoption("--fast"):
        refuse_what_is_slow(session.config)


def refuse_what_is_slow(config: pytest.Config) -> None:
    """From here on, a test that starts a process or compiles is skipped."""
    import torch

    def refuse_to_compile(*_, **__):
        pytest.skip("compiles, which --fast leaves out")

    def refuse_to_start(*_, **__):
        pytest.skip("starts a process, which --fast leaves out")

    def on_event(event: str, _: object) -> None:
        if event in STARTS and config.stash.get(AT_WORK, False):
            refuse_to_start()

    torch.compile = refuse_to_compile
    multiprocessing.util.spawnv_passfds = refuse_to_start  # of which the interpreter tells nothing
    sys.addaudithook(on_event)


@pytest.fixture(scope="session")
def caches(tmp_path_factory) -> Iterator[str]:
    """A new cache folder's name each time, which is made where something is kept there."""
    folder = tmp_path_factory.mktemp("caches")
    return (str(folder / str(number)) for number in itertools.count())


@pytest.fixture(autouse=True)
def cache_of_its_own(caches, monkeypatch):
    """What one test surveys, another must not find."""
    monkeypatch.setenv("INTERNVL_PACK_CACHE", next(caches))


@pytest.fixture(autouse=True)
def logs_reach_the_tests():
    """`finetune` takes the logs for itself; a test after it in the same process wants to see them again."""
    for name in ("internvl_pack", "train"):
        logger = logging.getLogger(name)
        logger.propagate = True
        if logger.level:  # a rank but the first tells errors alone
            logger.setLevel(logging.NOTSET)


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
