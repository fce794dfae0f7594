"""Pairs and groups from the file to the batch: each answer once, whatever the topology and the cuts."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import pyarrow.parquet
import pytest
import torch
from helpers.factory import TINY, write_jsonl
from helpers.presets import CONFIG, planned

from internvl_pack import PackedDataset, PackingConfig, build_loader, cli
from internvl_pack.batch.collate import PREFIX_ID
from internvl_pack.errors import UserError
from internvl_pack.plan.packed_state import PLAIN_FIELDS, TREE_FIELDS, from_json, to_json
from internvl_pack.plan.preset import PACKS
from internvl_pack.samples import Samples
from internvl_pack.stream import stored

COUNT = 40


def rewritten(folder, change):
    """The meta file of made-up rows, after `change(number, row, prompt, last turn)` of each."""
    meta = write_jsonl(folder, COUNT)
    for spec in json.loads(meta.read_text()).values():
        path = meta.parent / spec["annotation"]
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            *prompt, last = row["conversations"]
            change(number, row, prompt, last)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return meta


@pytest.fixture(scope="module")
def groups(tmp_path_factory):
    """Every third row a group of up to nine answers, some of them over the budget together."""

    def change(number, row, prompt, last):
        if number % 3 == 0:
            row |= {"conversations": prompt, "answers": [f"{last['value']} {n}" for n in range(1 + number % 9)]}

    return rewritten(tmp_path_factory.mktemp("groups"), change)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    def change(number, row, prompt, last):
        row |= {"conversations": prompt, "chosen": last, "rejected": {"from": "gpt", "value": "No."}}

    return rewritten(tmp_path_factory.mktemp("pairs"), change)


def epoch(meta, tokenizer, ranks, num_workers=0, objective="sft", tokens=400, state=None, stop=None):
    """Of each rank the batches of an epoch, and the state after `stop` steps."""
    config = PackingConfig(max_packed_tokens=tokens, num_images_expected=16, max_buffer_size=8, seed=3)
    encode = replace(TINY, objective=objective)
    found, states = [], []
    for rank in range(ranks):
        dataset = PackedDataset.from_meta(meta, tokenizer, config, encode=encode, rank=rank, world_size=ranks)
        loader = build_loader(dataset, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        batches = []
        for batch in loader:
            batches.append(batch)
            if stop is not None and len(batches) == stop:
                break
        found.append(batches)
        states.append(loader.state_dict())
    return found, states[0]


def answers_in(batches) -> Counter:
    """(sample, ids) of each branch with its prefix and of each plain sample."""
    seen: Counter = Counter()
    for batch in batches:
        bounds, ids = batch["cu_seqlens"].tolist(), batch["input_ids"][0].tolist()
        prefix_of = batch["prefix_of"].tolist() if "prefix_of" in batch else [-1] * len(batch["sample_ids"])
        for number, name in enumerate(batch["sample_ids"]):
            if name.startswith("<"):
                continue
            at = prefix_of[number]
            before = ids[bounds[at] : bounds[at + 1]] if at >= 0 else []
            seen[name, tuple(before + ids[bounds[number] : bounds[number + 1]])] += 1
    return seen


def test_every_answer_is_in_one_batch_whole(tokenizer, groups):
    (batches,), _ = epoch(groups, tokenizer, 1, tokens=2000)
    whole = answers_in(batches)
    expected = sum(1 + n % 9 if n % 3 == 0 else 1 for n in range(COUNT))
    assert len(whole) == whole.total() == expected
    assert any("prefix_of" in batch for batch in batches)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, num_workers", [(1, 0), (2, 0), (3, 2)])
def test_cut_trees_give_each_answer_once_on_every_topology(tokenizer, groups, ranks, num_workers):
    (uncut,), _ = epoch(groups, tokenizer, 1, tokens=2000)
    of_groups = {key for key in answers_in(uncut) if int(key[0].rsplit("/", 1)[1]) % 3 == 0}
    room = max(len(ids) for _, ids in of_groups) + 4  # for the longest answer with its prompt
    per_rank, _ = epoch(groups, tokenizer, ranks, num_workers, tokens=room)
    together = [batch for batches in per_rank for batch in batches]
    seen = answers_in(together)
    assert of_groups <= seen.keys()  # plain samples may be cut inside, answers never
    assert all(seen[key] == 1 for key in of_groups)
    cut = [f for batch in together if "prefix_of" in batch for f in batch["fragments"] if f[1] > 1]
    assert cut and max(batch["num_tokens"] for batch in together) <= room


@pytest.mark.slow
def test_an_epoch_of_pairs_goes_on_with_other_ranks(tokenizer, pairs):
    (whole,), _ = epoch(pairs, tokenizer, 1, objective="mpo")
    assert all(batch["pairs"].shape[1] == 2 for batch in whole)
    assert sum(len(batch["pairs"]) for batch in whole) == COUNT
    first, state = epoch(pairs, tokenizer, 2, objective="mpo", stop=3)
    rest, _ = epoch(pairs, tokenizer, 3, objective="mpo", state=state)
    seen = answers_in(batch for part in (first, rest) for batches in part for batch in batches)
    assert seen == answers_in(whole) and set(seen.values()) == {1}
    for batch in whole:
        for chosen, rejected in batch["pairs"].tolist():
            assert batch["sample_ids"][chosen - 1] == PREFIX_ID and rejected == chosen + 1
            assert batch["sample_ids"][chosen] == batch["sample_ids"][rejected]


@pytest.mark.slow
def test_a_plan_knows_what_trees_cost(tokenizer, groups):
    """Its pairs of tokens that see each other are those of the batches, which count them by segments."""
    config = PackingConfig(max_packed_tokens=400, num_images_expected=16, max_buffer_size=8, seed=3)
    dataset = PackedDataset.from_meta(groups, tokenizer, config, encode=TINY)
    (batches,), _ = epoch(groups, tokenizer, 1)
    packs = [step.packs[0] for step in dataset.step_plan(0, 1)]
    for pack, batch in zip(packs, batches, strict=True):
        pairs = sum(f.num_tokens**2 - f.num_unseen_pairs for f in pack.fragments)
        assert pairs == batch["sum_squared_lengths"]
        assert sum(f.num_branches for f in pack.fragments) == (batch.get("prefix_of", torch.zeros(0)) >= 0).sum()
    trees = [f for pack in packs for f in pack.fragments if f.num_branches]
    assert any(f.num_unseen_pairs for f in trees) and any(f.count > 1 for f in trees)


@pytest.fixture(scope="module")
def tokenizer_dir(tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


OF_RUN = ["--max_packed_tokens", "400", "--num_images_expected", "16", "--max_buffer_size", "8", "--seed", "3"]
OF_RUN += ["--force_image_size", "56", "--max_dynamic_patch", "6", "--dynamic_image_size", "True"]
OF_RUN += ["--use_thumbnail", "True"]


@pytest.mark.slow
def test_the_commands_show_trees(tokenizer, tokenizer_dir, groups, tmp_path, capsys):
    """Trees, branches and tokens saved are those of the batches, counted there by their segments."""
    (batches,), _ = epoch(groups, tokenizer, 1)
    trees = branches = saved = 0
    for batch in batches:
        lengths = batch["cu_seqlens"].diff().tolist()
        of = [n for n in batch["prefix_of"].tolist() if n >= 0] if "prefix_of" in batch else []
        for prefix, count in Counter(of).items():
            trees, branches, saved = trees + 1, branches + count, saved + (count - 1) * lengths[prefix]
    for command in (
        ["stats"],
        ["simulate", "--ranks", "1"],
        ["preview", "--packs", "1000", "--out", tmp_path / "p.html"],
    ):
        name, *rest = map(str, command)
        assert cli.main([name, str(groups), "--tokenizer", tokenizer_dir, *rest, *OF_RUN]) == 0
        out = capsys.readouterr().out
        if name == "stats":
            assert f"{trees:,} prefix trees with {branches:,} branches save {saved:,} tokens, " in out
        elif name == "simulate":
            line = next(line for line in out.splitlines() if line.startswith("prefix trees"))
            assert line.split()[2] == f"{trees:,}" and f"with {branches:,} branches; sharing saves {saved:,} " in line
    page = (tmp_path / "p.html").read_text()
    assert f"{branches:,} branches, {saved:,} tokens saved by sharing" in page
    roles = re.findall(r'<span class="part">((?:prefix|branch) of [^<]*)</span>', page)
    assert sum(role.startswith("branch") for role in roles) == branches and len(roles) == trees + branches
    assert PREFIX_ID not in page and "&lt;prefix&gt;" not in page
    prefix = next(role for role in roles if " to " in role)
    first, last = map(int, re.findall(r"\d+", prefix))
    assert roles[roles.index(prefix) + 1 :][: last - first + 1] == [f"branch of {first - 1}"] * (last - first + 1)


@pytest.mark.slow
def test_the_commands_show_pairs_and_name_their_faults(tokenizer_dir, pairs, tmp_path, capsys):
    of_pairs = [str(pairs), "--tokenizer", tokenizer_dir, "--objective", "mpo"]
    assert cli.main(["validate", *of_pairs]) == 0
    page = tmp_path / "p.html"
    assert cli.main(["preview", *of_pairs, "--packs", "1000", "--out", str(page), *OF_RUN]) == 0
    roles = re.findall(r'<span class="part">((?:prefix|branch|chosen|rejected) of [^<]*)</span>', page.read_text())
    assert [role.split()[0] for role in roles] == ["prefix", "chosen", "rejected"] * COUNT
    assert cli.main(["validate", str(pairs), "--tokenizer", tokenizer_dir]) == 1
    assert re.search(rf"preference_data +{COUNT} ", capsys.readouterr().out)

    def spoilt(number, row, prompt, last):
        row |= {"conversations": prompt, "chosen": last, "rejected": {"from": "gpt", "value": "No."}}
        if number == 3:
            row["rejected"] = {"from": "gpt", "value": "  "}
        elif number == 5:
            row["question"] = "Twice?"
        elif number == 8:
            del row["rejected"]

    bad = rewritten(tmp_path, spoilt)
    assert cli.main(["validate", str(bad), "--tokenizer", tokenizer_dir, "--objective", "dpo", "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["bad_samples"]
    assert [(sample["index"], sample["reason"]) for sample in found] == [
        (3, "no_trained_token"),
        (5, "answers"),
        (8, "no_preference_data"),
    ]


def test_presets_and_states_have_columns_of_trees_where_there_are_trees(tokenizer, groups, tmp_path):
    plain = write_jsonl(tmp_path / "plain", COUNT)
    for meta, is_tree in ((groups, True), (plain, False)):
        preset = planned(meta, tmp_path / str(is_tree), tokenizer)
        names = pyarrow.parquet.read_schema(preset.folder / PACKS).names
        assert [name in names for name in TREE_FIELDS] == [is_tree] * 3
        plan = PackedDataset.from_meta(meta, tokenizer, CONFIG, encode=TINY).step_plan(0, 2)
        fragments = [f for step in plan for pack in step.packs for f in pack.fragments]
        stored = [f for number in range(preset.num_packs(0)) for f in preset.pack(0, number).fragments]
        assert sorted(fragments) == sorted(stored)
        plan = PackedDataset.from_meta(meta, tokenizer, CONFIG, encode=TINY).step_plan(0, 2)
        for _ in range(4):
            plan.next_step()
        state = to_json(plan.state_dict())
        assert state["pooled"]["columns"] == PLAIN_FIELDS + 3 * is_tree
        again = PackedDataset.from_meta(meta, tokenizer, CONFIG, encode=TINY).step_plan(0, 2)
        again.load_state_dict(from_json(state))
        assert list(again) == list(plan)


def test_a_presets_data_has_no_trees(tokenizer, groups, tmp_path):
    preset = planned(groups, tmp_path / "preset", tokenizer)
    with pytest.raises(UserError, match=r"--materialise: made/[0-9]+ has several answers"):
        list(stored.materialise(preset, Samples.from_meta(groups, tokenizer, TINY)))
