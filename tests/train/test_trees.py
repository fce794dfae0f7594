"""Groups of answers through `finetune.py`: packed they train as the answers one by one."""

from __future__ import annotations

import json

import pytest
from helpers import rows_alike
from helpers.factory import write_jsonl
from helpers.tree_samples import trees
from safetensors.torch import load_file

from internvl_pack.batch.collate import packed_collate_fn
from internvl_pack.batch.row import PackRow
from train.accounting import batch_ids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Twelve rows, all but every fourth a group of two to four answers."""
    meta = write_jsonl(tmp_path_factory.mktemp("groups"), 12)
    for spec in json.loads(meta.read_text()).values():
        path = meta.parent / spec["annotation"]
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            if number % 4:
                last = row["conversations"].pop()["value"]
                row["answers"] = [f"{last} {n}" for n in range(1 + number % 4)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return meta


def test_groups_train_packed_as_they_do_one_by_one(train, made, groups, tmp_path):
    """An epoch is one step: a row that holds all of it, or a padded batch."""
    ways = {
        "packed": ("--use_packed_ds", "True"),
        "padded": ("--use_packed_ds", "False", "--per_device_train_batch_size", "12"),
    }
    common = ("--meta_path", str(groups), "--num_train_epochs", "2", "--loss_reduction", "square")
    common += ("--max_packed_tokens", "8192", "--max_seq_length", "8192", "--num_images_expected", "200")
    common += ("--max_grad_norm", "0", "--log_sample_ids", "True", "--save_strategy", "no")
    found = {}
    for way, options in ways.items():
        assert train(*common, *options, out=tmp_path / way) == 0
        summary = json.loads((tmp_path / way / "train_summary.json").read_text())
        assert (summary["steps"], summary["samples_packed"]) == (2, 24)
        found[way] = summary["loss_first"], load_file(tmp_path / way / "model.safetensors")
    (packed_loss, packed), (padded_loss, padded) = found["packed"], found["padded"]
    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)
    before = load_file(made / "model" / "model.safetensors")
    for name, weights in padded.items():
        moved = (weights - before[name]).norm()
        assert (packed[name] - weights).norm() <= 1e-3 * moved + 1e-6, name  # AdamW takes signs of tiny gradients
    lines = (tmp_path / "packed" / "sample_ids" / "rank00000.jsonl").read_text().splitlines()
    assert lines and not any("<" in sample_id for line in lines for sample_id in json.loads(line)["ids"])


def test_rows_that_share_their_beginning_train_as_they_do_alone(train, tmp_path):
    meta = rows_alike.write(tmp_path / "data", "jsonl")
    common = ("--meta_path", str(meta), "--num_train_epochs", "1", "--loss_reduction", "square", "--max_grad_norm", "0")
    common += ("--max_packed_tokens", "8192", "--max_seq_length", "8192", "--num_images_expected", "200")
    common += ("--use_packed_ds", "True", "--log_sample_ids", "True", "--save_strategy", "no")
    losses, ids, tokens = [], [], []
    for share in ("True", "False"):
        assert train(*common, "--share_prefix", share, out=tmp_path / share) == 0
        summary = json.loads((tmp_path / share / "train_summary.json").read_text())
        assert summary["steps"] == 1
        losses.append(summary["loss_first"])
        (line,) = (tmp_path / share / "sample_ids" / "rank00000.jsonl").read_text().splitlines()
        ids.append(sorted(json.loads(line)["ids"]))
        tokens.append(summary["num_real_tokens"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert ids[0] == ids[1] and len(set(ids[0])) == len(rows_alike.ROWS) - 1 and tokens[0] < tokens[1]


def test_a_prefix_is_no_sample(tokenizer):
    batch = packed_collate_fn([PackRow(trees(tokenizer, "text only"))], image_size=56)
    assert batch["sample_ids"][0] == "<prefix>" and batch_ids(batch) == ["synthetic/0"] * 3
