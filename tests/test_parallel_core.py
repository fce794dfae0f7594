"""Sequence parallelism over 2 and 4 processes: what a row gives must not depend on how many ranks share it."""

from __future__ import annotations

import json
import multiprocessing
import socket

import pytest
from sequence_worker import CASES, MODES, WORLD, run_all

LOSS = 1e-6
GRADIENT = 1e-5


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of all cases, by name: four processes, started once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = tmp_path_factory.mktemp("sequence") / "found.json"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["sequence_worker"])
    ranks = [context.Process(target=run_all, args=(rank, port, str(out))) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * WORLD
    return json.loads(out.read_text())


@pytest.mark.parametrize(
    ("mode", "size", "name"), [(*group, name) for name, case in CASES.items() for group in case.groups]
)
def test_loss_and_every_gradient_are_those_of_one_rank(found, mode, size, name):
    errors = found[f"{mode} {size}: {name}"]
    assert errors["sums"] <= LOSS, "the loss is among them"
    assert errors["target_losses"] <= 1e-5
    assert errors["gradient"] <= GRADIENT, errors["where"]


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
