"""Sequence parallelism over 2 and 4 processes: what a row gives must not depend on how many ranks share it."""

from __future__ import annotations

import json

import pytest
from helpers.ranks import run
from helpers.sequence_worker import CASES, MODES, WORLD

pytestmark = pytest.mark.slow

LOSS = 1e-6
GRADIENT = 1e-5


def found_by_ranks(folder, cases, world=WORLD, with_checks=False):
    """Results by name, of `world` processes over a table of sequence_worker."""
    out = folder / "found.json"
    what = {"out": str(out), "cases": cases, "with_checks": with_checks}
    run("helpers.sequence_worker:run", what, world, folder / "log")
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return found_by_ranks(tmp_path_factory.mktemp("sequence"), "CASES", with_checks=True)


@pytest.mark.parametrize(
    ("mode", "size", "name"), [(*group, name) for name, case in CASES.items() for group in case.groups]
)
def test_loss_and_every_gradient_are_those_of_one_rank(found, mode, size, name):
    check(found[f"{mode} {size}: {name}"])


def check(errors):
    assert errors["sums"] <= LOSS, "the loss is among them"
    assert errors["target_losses"] <= 1e-5
    assert errors["gradient"] <= GRADIENT, errors["where"]


def test_compiled_blocks_give_the_same(tmp_path):
    check(found_by_ranks(tmp_path, "COMPILED", world=1)["ulysses 1: compiled"])


@pytest.mark.parametrize("mode", MODES)
def test_two_data_by_two_sequence_ranks_averaged_give_the_step_of_one_rank(found, mode):
    errors = found[f"data and sequence: {mode}"]
    assert errors["loss"] <= LOSS
    assert errors["gradient"] <= GRADIENT


@pytest.mark.parametrize("mode", MODES)
def test_isolation_is_checked_on_the_gathered_row(found, mode):
    result = found[f"isolation: {mode}"]
    assert result["sound"]
    assert result["leak"].startswith("attention of decoder layer 1")


@pytest.mark.parametrize("mode", MODES)
def test_logits_asked_for_are_the_whole_rows(found, mode):
    assert found[f"logits: {mode}"] <= GRADIENT


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_of_four_keeps_a_quarter_of_the_activations(found, mode):
    assert 0.2 < found[f"activations: {mode}"] <= 0.35
