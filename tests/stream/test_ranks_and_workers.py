"""Ranks and workers: unequal data, seeds, epochs, resumes on other topologies, memory, and a worker that is killed."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers.factory import write_jsonl, write_meta, write_shards
from helpers.loaders import segments_of, stream_loader, stream_loaders
from torch.utils.data import get_worker_info

from internvl_pack.config import PackingConfig
from internvl_pack.encode import sample as encode_sample
from internvl_pack.errors import UserError
from internvl_pack.stream.state import make_state, read_state
from train.interruption import defer_worker_death

pytestmark = pytest.mark.slow

CONFIG = PackingConfig(max_packed_tokens=260, num_images_expected=16)


def real_ids(batches) -> list[str]:
    """Ids of the samples of batches; a split sample counts with its first fragment."""
    return [name for batch in batches for name, (index, _) in segments_of(batch) if index == 0]


def text_rows(path: Path, count: int) -> None:
    """`count` short text-only rows, written quickly."""
    with open(path, "w", encoding="utf-8") as lines:
        for start in range(0, count, 10_000):
            lines.write(
                "".join(
                    f'{{"conversations":[{{"from":"human","value":"q {i}"}},{{"from":"gpt","value":"a {i}"}}]}}\n'
                    for i in range(start, min(count, start + 10_000))
                )
            )


@pytest.mark.parametrize("rows", [1, 9])
def test_ranks_with_unequal_data_make_equal_steps(rows, tokenizer, tmp_path):
    """Fewer samples than ranks' rows: some ranks have less, or nothing, and end with the others."""
    meta = write_jsonl(tmp_path, rows)
    own = [list(loader) for loader in stream_loaders(meta, tokenizer, 4, config=CONFIG, accumulation=2)]
    assert len({len(batches) for batches in own}) == 1
    assert len({sum(batch["num_tokens"] for batch in batches) for batches in own}) > 1, "unequal, or nothing is tested"
    fillers = [batch for batches in own for batch in batches if not batch["num_segments"]]
    assert all(float(batch["loss_weight"].sum()) == 0.0 for batch in fillers) and (fillers or rows > 1)
    seen = Counter(i for batches in own for i in real_ids(batches))
    assert len(seen) == rows and set(seen.values()) == {1}


def test_of_more_readers_than_shards_all_have_something_or_end_quietly(tokenizer, tmp_path):
    meta = write_shards(tmp_path, 15, per_shard=5)
    seen = Counter(
        i for loader in stream_loaders(meta, tokenizer, 2, config=CONFIG, num_workers=4) for i in real_ids(loader)
    )
    assert len(seen) == 15 and set(seen.values()) == {1}


def test_the_order_does_not_come_from_torchs_global_seed(tokenizer, tmp_path):
    meta = write_shards(tmp_path, 64, per_shard=4)
    for epoch in range(2):
        seen: Counter[str] = Counter()
        for rank, loader in enumerate(stream_loaders(meta, tokenizer, 2, config=CONFIG, num_workers=2)):
            torch.manual_seed(1234 + rank)
            loader.set_epoch(epoch)
            seen.update(real_ids(loader))
        assert len(seen) == 64 and set(seen.values()) == {1}


def test_resuming_late_in_a_million_rows_takes_seconds_and_decodes_nothing(tokenizer, tmp_path, monkeypatch):
    rows = 1_000_000
    text_rows(tmp_path / "big.jsonl", rows)
    meta = write_meta(tmp_path, {"big": {"root": "", "annotation": "big.jsonl"}})
    config = PackingConfig(max_packed_tokens=4096)
    loader = stream_loader(meta, tokenizer, config=config)
    next(iter(loader))
    _, state, _ = read_state(loader.state_dict(), None)
    # As far as reading goes, a run at 90 % is a cursor, and samples and packs that wait.
    reader, tables = state["sequence"]["reader"], (state["sequence"]["waiting"], state["pooled"])
    shift = int(rows * 0.9) - reader["cursor"]
    reader["cursor"] += shift
    for table in tables:
        table[:, 0] += shift  # Fragment.position
    mixture, samples = loader.packed_dataset.mixture(0), loader.packed_dataset.samples
    for table in tables:
        for fragment in table:
            record = samples.encode(*mixture.locate(int(fragment[0]))).record
            fragment[4] = record.num_tokens  # Fragment.token_stop
    counts = state["ledger"]["counts"]
    for name in ("samples_in", "samples_packed", "fragments_in", "fragments_packed"):
        counts[name] += shift
    counts["tokens_in"] = counts["tokens_packed"] + sum(int(table[:, 4].sum()) for table in tables)
    late = stream_loader(meta, tokenizer, config=config)
    saved = make_state(0, late.packed_dataset.fingerprint(), state, late.losses.state_dict())
    read = []
    encoder = late.packed_dataset.encoder
    monkeypatch.setattr(encoder, "decode", _counting(encoder.decode, read))
    late.load_state_dict(json.loads(json.dumps(saved)))
    started = time.perf_counter()
    batch = next(iter(late))
    assert time.perf_counter() - started < 5.0
    assert len(read) == batch["num_segments"] > 10, "only the samples of the pack itself may be decoded"
    assert not late.take_events()


def _counting(decode, calls):
    def counted(*args, **kwargs):
        calls.append(args)
        return decode(*args, **kwargs)

    return counted


def test_tensor_parallel_peers_get_the_same_packs_and_all_ranks_one_state(tokenizer, tmp_path):
    """Four processes, two data ranks: the data rank is what a dataset is told."""
    meta = write_jsonl(tmp_path, 60)
    peers = []
    for process in range(4):
        loader = stream_loader(meta, tokenizer, process // 2, 2, config=CONFIG)
        iterator = iter(loader)
        peers.append((real_ids(next(iterator) for _ in range(6)), loader.state_dict()))
    assert peers[0] == peers[1] and peers[2] == peers[3]
    assert not set(peers[0][0]) & set(peers[2][0])
    assert peers[0][1] == peers[2][1]


def test_memory_of_workers_is_flat_over_epochs(tokenizer, tmp_path):
    """Rows are numpy offsets: no Python object a row, whose reference count would copy pages in workers."""
    rows = 400_000
    text_rows(tmp_path / "big.jsonl", rows)
    meta = write_meta(tmp_path, {"big": {"root": "", "annotation": "big.jsonl"}})
    config = PackingConfig(max_packed_tokens=2048)
    loader = stream_loader(meta, tokenizer, config=config, num_workers=4, persistent_workers=True)
    sizes = []
    for epoch in range(4):
        loader.set_epoch(epoch)
        for number, _ in enumerate(loader):
            if number == 120:
                break
        sizes.append(sum(_private_bytes(w.pid) for w in loader._iterator._workers))
    # The first epoch warms up: caches of words and grids, which are bounded.
    assert sizes[3] - sizes[1] < 16 * 2**20, f"private memory of four workers by epoch: {sizes}"


def _private_bytes(pid: int) -> int:
    """Anonymous memory of a process that it shares with nobody."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("Private_Dirty"):
                total += int(line.split()[1]) * 1024
    return total


def end_of_file(*_, **__):
    """What a socket gives over which tensors come, before the process that had them counts as dead."""
    raise EOFError


@pytest.mark.parametrize("seen_as", ["silence", "end of file"])
def test_a_worker_that_is_killed_is_an_error_that_names_it(tokenizer, tmp_path, monkeypatch, seen_as):
    meta = write_jsonl(tmp_path, 200)
    loader = stream_loader(meta, tokenizer, config=CONFIG, num_workers=2, persistent_workers=True)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"DataLoader worker 1 \(pid \d+, SIGKILL"):
        for number, _ in enumerate(loader):
            if number == 3:
                defer_worker_death()  # as the trainer does: else torch's signal handler raises wherever it finds us
                os.kill(loader._iterator._workers[1].pid, 9)
                if seen_as == "end of file":
                    monkeypatch.setattr(loader._iterator, "_try_get_data", end_of_file)
    assert time.monotonic() - started < 60


def test_a_worker_that_is_killed_between_two_iterations_is_the_same_error(tokenizer, tmp_path, monkeypatch):
    loader = stream_loader(write_jsonl(tmp_path, 40), tokenizer, config=CONFIG, num_workers=2, persistent_workers=True)
    next(iter(loader))
    defer_worker_death()
    os.kill(loader._iterator._workers[1].pid, 9)
    monkeypatch.setattr(loader._iterator, "_try_get_data", end_of_file)
    with pytest.raises(RuntimeError, match=r"DataLoader worker 1 \(pid \d+, SIGKILL"):
        iter(loader)


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_a_run_that_ends_by_an_error_does_not_wait_for_busy_readers(persistent, tokenizer, tmp_path, monkeypatch):
    decode, calls = encode_sample.decode_tiles, Counter()

    def slow(*args, **options):
        calls[os.getpid()] += 1
        if calls[os.getpid()] > 1 and get_worker_info().id:
            time.sleep(120)
        return decode(*args, **options)

    monkeypatch.setattr(encode_sample, "decode_tiles", slow)
    loader = stream_loader(
        write_jsonl(tmp_path, 200), tokenizer, config=CONFIG, num_workers=4, persistent_workers=persistent
    )
    before = set(multiprocessing.active_children())
    with pytest.raises(UserError, match="a mistake"):
        for _ in loader:
            time.sleep(0.5)  # until the others are at their second picture
            started = time.monotonic()
            raise UserError("a mistake")
    del loader
    gc.collect()
    assert time.monotonic() - started < 4, "torch waits 5 s for each of the three"
    assert set(multiprocessing.active_children()) <= before
