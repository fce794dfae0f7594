"""A run that goes on is the one meant: what is complete, which was written last, what may be removed and when."""

from __future__ import annotations

import errno
import json
import os
import random
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from internvl_pack.errors import UserError
from train.checkpoint import (
    PACKING_STATE,
    compared_options,
    differences,
    find_checkpoint,
    folders_of,
    give_usual_modes,
    inspect,
    load_packing_state,
    mark,
    remove,
    rotate,
    writing_to,
)

STATE = {"version": 3, "epoch": 0, "options": {"seed": 42}, "plan": None, "losses": {}}


def checkpoint(output_dir: Path, step: int, state: dict | None = STATE) -> Path:
    """A folder as a run writes it; `state` None: without a mark."""
    folder = output_dir / f"checkpoint-{step}"
    (folder / "global_step1").mkdir(parents=True)
    (folder / "model-00001.safetensors").write_bytes(bytes(1000))
    (folder / "global_step1" / "rank_0.pt").write_bytes(bytes(500))
    if state is not None:
        mark(folder, state)
    return folder


def test_auto_takes_the_one_written_last_and_says_which(tmp_path, caplog):
    """A run that began anew in the same folder has the lower step."""
    checkpoint(tmp_path, 100)
    newest = checkpoint(tmp_path, 20)
    checkpoint(tmp_path, 200, state=None)
    (tmp_path / "checkpoint-best").mkdir()
    assert find_checkpoint("auto", tmp_path) == find_checkpoint("True", tmp_path) == newest
    assert f"going on from {newest}, step 20" in caplog.text


@pytest.mark.parametrize("value", [None, "False", "none", ""])
def test_nothing_is_gone_on_from_unless_asked(tmp_path, value):
    checkpoint(tmp_path, 1)
    assert find_checkpoint(value, tmp_path) is None


def test_auto_without_a_checkpoint_begins_anew(tmp_path):
    checkpoint(tmp_path, 3, state=None)
    assert find_checkpoint("auto", tmp_path) is find_checkpoint("auto", tmp_path / "nowhere") is None


def cut_mark(folder: Path) -> None:
    text = (folder / PACKING_STATE).read_text()
    (folder / PACKING_STATE).write_text(text[: len(text) // 2])


DAMAGE = {
    "a mark that is cut": (cut_mark, "cannot be read"),
    "an empty mark": (lambda folder: (folder / PACKING_STATE).write_text(""), "cannot be read"),
    "a mark of another kind": (lambda folder: (folder / PACKING_STATE).write_text("[1]"), "no object"),
    "a missing shard": (
        lambda folder: (folder / "model-00001.safetensors").unlink(),
        "model-00001.safetensors is missing",
    ),
    "a shard that is cut": (lambda folder: os.truncate(folder / "global_step1" / "rank_0.pt", 9), "9 bytes, 500 were"),
    "no version": (lambda folder: mark(folder, {"options": {}}), "lacks its version"),
    "no options": (lambda folder: mark(folder, {"version": 3}), "lacks its version or options"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, caplog, kind):
    damage, told = DAMAGE[kind]
    before, newest = checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    damage(newest)
    assert find_checkpoint("auto", tmp_path) == before
    assert f"{newest} is passed over: " in caplog.text and told in caplog.text
    with pytest.raises(UserError, match=f"checkpoint-2: no complete checkpoint: .*{told}.*is {before}"):
        find_checkpoint(str(newest), tmp_path)
    damage(before)
    with pytest.raises(UserError, match=f"every checkpoint of {tmp_path} is damaged"):
        find_checkpoint("auto", tmp_path)


def test_lanes_that_have_not_begun_are_not_missed(tmp_path):
    folder = checkpoint(tmp_path, 1, STATE | {"global_packs": 2, "lanes": {"0": {}, "1": {}}})
    assert inspect(folder).damage == ""


def test_a_damaged_state_is_one_line(tmp_path):
    folder = checkpoint(tmp_path, 1)
    cut_mark(folder)
    with pytest.raises(UserError, match=f"{PACKING_STATE} cannot be read"):
        load_packing_state(folder)


def test_forged_marks_are_damage_and_never_an_error(tmp_path):
    draw, folder = random.Random(0), checkpoint(tmp_path, 1)
    good = (folder / PACKING_STATE).read_bytes()
    values = ["null", "true", "-1", "1e308", '"x"', "[]", "{}", '{"../../../etc/passwd": 3}', '{"\\u0000": 1}', "[[[["]
    for _ in range(400):
        text = good.decode()
        for _ in range(draw.randrange(1, 4)):
            place = draw.randrange(len(text))
            text = text[:place] + draw.choice(values) + text[place + draw.randrange(12) :]
        (folder / PACKING_STATE).write_text(text)
        assert isinstance(inspect(folder).damage, str)
        find_checkpoint("auto", tmp_path) if not inspect(folder).damage else None


# --- removal


def test_rotation_keeps_the_newest_complete_one_whatever_the_limit(tmp_path):
    for step in (1, 2, 3):
        checkpoint(tmp_path, step)
    checkpoint(tmp_path, 4, state=None)
    rotate(tmp_path, 1)
    assert [path.name for path in folders_of(tmp_path)] == ["checkpoint-3"]


def test_rotation_keeps_the_best_and_counts_models_without_a_state(tmp_path):
    for step in (1, 2, 3, 4):
        checkpoint(tmp_path, step)
    rotate(tmp_path, 2, keep=tmp_path / "checkpoint-1")
    assert [path.name for path in folders_of(tmp_path)] == ["checkpoint-1", "checkpoint-4"]
    for step in (5, 6, 7):
        checkpoint(tmp_path / "models", step, state=None)
        os.utime(tmp_path / "models" / f"checkpoint-{step}", (step, step))
    rotate(tmp_path / "models", 1)
    assert [path.name for path in folders_of(tmp_path / "models")] == ["checkpoint-7"]


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_nothing_is_removed(tmp_path, limit):
    checkpoint(tmp_path, 1), checkpoint(tmp_path, 2)
    rotate(tmp_path, limit)
    assert len(folders_of(tmp_path)) == 2


class Killed(BaseException):
    """Stands for a kill at a moment of the test's choice."""


def kill_at(monkeypatch, moment: int) -> None:
    """Every call that changes the disk counts as a moment; the run dies before one of them."""
    count = 0

    def dying(whole):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == moment:
                raise Killed
            return whole(*args, **kwargs)

        return call

    for owner, name in ((os, "unlink"), (os, "rmdir"), (os, "replace"), (os, "fsync"), (Path, "unlink")):
        monkeypatch.setattr(owner, name, dying(getattr(owner, name)))


@pytest.mark.parametrize("moment", range(1, 40))
def test_at_every_moment_of_saving_and_rotation_there_is_one_to_go_on_from(tmp_path, monkeypatch, moment):
    """Also while a checkpoint of the same step is overwritten."""
    checkpoint(tmp_path, 1)
    died = False
    with monkeypatch.context() as patch:
        kill_at(patch, moment)
        try:
            for step in (2, 3, 3):
                folder = tmp_path / f"checkpoint-{step}"
                if not folder.exists():
                    checkpoint(tmp_path, step, state=None)
                else:  # what a run does that went on from 2 after 3 was written
                    rotate(tmp_path, 2)
                    if len(folders_of(tmp_path)) > 1:
                        remove(folder)
                        checkpoint(tmp_path, step, state=None)
                mark(folder, STATE)
                rotate(tmp_path, 2 if step == 2 else 1)
        except Killed:
            died = True
    found = find_checkpoint("auto", tmp_path)
    assert found is not None and inspect(found).damage == ""
    if not died:
        assert found.name == "checkpoint-3"


def test_a_folder_that_is_written_again_keeps_nothing_of_the_run_before(tmp_path):
    """A run on four ranks was killed before the mark, one rank writes the step again: three shards would be left."""
    folder = checkpoint(tmp_path, 6, state=None)
    (folder / "global_step1" / "rank_3.pt").write_bytes(b"")
    remove(folder)
    remove(folder)
    assert not folder.exists()


# --- writing


def test_no_space_is_one_line_and_leaves_no_half_written_folder(tmp_path):
    folder = checkpoint(tmp_path, 5)
    told = r"no space to write .*checkpoint-5: [\d,]+ bytes were free, the half-written"
    with pytest.raises(UserError, match=told), writing_to(folder):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("safetensors") from error
    assert not folder.exists()


def test_other_errors_and_other_folders_are_left_alone(tmp_path):
    folder = checkpoint(tmp_path, 5)
    with pytest.raises(KeyError), writing_to(folder):
        raise KeyError("x")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="no space to write"), writing_to(tmp_path / "out"):
        raise OSError(errno.EDQUOT, "Disk quota exceeded")
    assert folder.exists() and (tmp_path / "out").exists()


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_saved_files_have_the_modes_of_the_umask(tmp_path, umask, mode):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x")
    path.chmod(0o600)
    before = os.umask(umask)
    try:
        give_usual_modes(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_options_that_the_checkpoint_overrules_are_told():
    args = SimpleNamespace(learning_rate=1e-4, weight_decay=0.1, adam_beta1=0.9, adam_beta2=0.95, adam_epsilon=1e-8)
    state = json.loads(json.dumps(compared_options(args, None)))
    assert differences(state, args, None) == differences({}, args, None) == []
    args.learning_rate = 2e-5
    (line,) = differences(state, args, None)
    assert line == "--learning_rate 2e-05 is overruled by the checkpoint, which goes on with 0.0001"
