"""The checkpoints of a run on disk: which are complete, which was written last, and which may go.

    checkpoint-30/  model, optimizer, ...        written first, by all ranks, and synced to disk
                    packing_state.json           the mark, written last: names every file before it with its size
    checkpoint-20/                               removed only once 30 is marked; its own mark goes first

So at any moment, whenever a run or its machine dies, the newest folder with a mark that holds what it names is one to
go on from, and with `save_total_limit 1` there is always one.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from internvl_pack.errors import UserError

if TYPE_CHECKING:
    from transformers import TrainingArguments

logger = logging.getLogger(__name__)

PACKING_STATE = "packing_state.json"  # written last: its presence marks a checkpoint as complete
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
FILES, SAVED_AT, OPTIMIZER, FP8 = "files", "saved_at", "optimizer", "fp8"

# Options that a checkpoint's optimizer and scheduler bring with them, whatever the command line says.
OVERRULED = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon")


@dataclass(frozen=True)
class Checkpoint:
    """A folder `checkpoint-N`.

    step: N.
    saved_at: seconds since 1970, by the clock of the machine that wrote the mark; of the folder where there is none.
    damage: what is wrong with it, in a few words; "" where it can be resumed.
    """

    folder: Path
    step: int
    saved_at: float
    damage: str


def step_of(folder: Path) -> int | None:
    """N of `checkpoint-N`; None for any other name."""
    name, _, number = folder.name.partition("-")
    return int(number) if name == "checkpoint" and number.isdecimal() else None


def folders_of(output_dir: str | Path) -> list[Path]:
    """All folders `checkpoint-N`, complete or not, by N."""
    found = [path for path in Path(output_dir).glob("checkpoint-*") if path.is_dir() and step_of(path) is not None]
    return sorted(found, key=lambda path: step_of(path) or 0)


def inspect(folder: Path) -> Checkpoint:
    """Read a folder's mark, and look for what it names. Nothing is loaded."""
    path = folder / PACKING_STATE
    state, damage = _read_mark(path)
    saved_at = state.get(SAVED_AT)
    if not isinstance(saved_at, int | float) or isinstance(saved_at, bool):
        try:
            saved_at = (path if path.is_file() else folder).stat().st_mtime
        except OSError:
            saved_at = 0.0
    return Checkpoint(folder, step_of(folder) or 0, float(saved_at), damage or _missing(folder, state.get(FILES, {})))


def _read_mark(path: Path) -> tuple[dict[str, Any], str]:
    """What a mark holds, and what is wrong with it: "" for nothing."""
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, f"{PACKING_STATE} is missing: it was not completed"
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{PACKING_STATE} cannot be read ({str(error)[:120]})"
    if not isinstance(state, dict):
        return {}, f"{PACKING_STATE} holds no object"
    # What the plan's state holds is the loader's to check: one of another version is whole, and refused by its number.
    if not isinstance(state.get("version"), int) or not isinstance(state.get("options"), dict):
        return state, f"{PACKING_STATE} lacks its version or options"
    return state, ""


def _missing(folder: Path, files: Any) -> str:
    """What of a checkpoint's files, sizes by name, is not there, "" for nothing."""
    if not isinstance(files, dict):
        return f"{PACKING_STATE} names its files in no object"
    for name, size in files.items():
        try:
            found = (folder / name).stat().st_size
        except (OSError, ValueError):
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes, {size} were written"
    return ""


def _newest_first(output_dir: str | Path) -> list[Checkpoint]:
    marked = [inspect(folder) for folder in folders_of(output_dir) if (folder / PACKING_STATE).is_file()]
    return sorted(marked, key=lambda each: (each.saved_at, each.step), reverse=True)


def is_none(value: str | bool | None) -> bool:
    """Whether `--resume_from_checkpoint` says that there is nothing to go on from; from Python it may be False."""
    return str(value).lower() in ("false", "no", "none", "")


def find_checkpoint(value: str | None, output_dir: str | Path) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` means.

    Args:
        value: a folder; `auto` (or True): the complete one of `output_dir` that was written last; None or False.

    Returns:
        None where there is none to go on from.

    Raises:
        UserError: the folder named is none, or is damaged; all of `output_dir` are damaged.
    """
    if value is None or is_none(value):
        return None
    if value.lower() not in ("auto", "true", "yes", "last"):
        _check_named(Path(value))
        return Path(value)
    marked = _newest_first(output_dir)
    for each in marked:
        if not each.damage:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.saved_at))
            logger.warning(
                "resume: going on from %s, step %d, written %s; --overwrite_output_dir True starts anew",
                *(each.folder, each.step, when),
            )
            return each.folder
        logger.warning("resume: %s is passed over: %s", each.folder, each.damage)
    if marked:
        raise UserError(
            f"--resume_from_checkpoint {value}: every checkpoint of {output_dir} is damaged (the last one: "
            f"{marked[0].damage}); remove them to begin anew"
        )
    return None


def _check_named(folder: Path) -> None:
    found = inspect(folder)
    if not found.damage:
        return
    others = [each for each in _newest_first(folder.parent) if not each.damage and each.folder.name != folder.name]
    instead = f"; complete and written last before it is {others[0].folder}" if others else "; try auto"
    raise UserError(f"--resume_from_checkpoint {folder}: no complete checkpoint: {found.damage}{instead}")


def load_packing_state(checkpoint: str | Path) -> dict[str, Any]:
    """The state of the run's data, with the `world_size` it was saved on; all else is taken to be there.

    Raises:
        UserError: the checkpoint was not completed, or is not one of ours.
    """
    state, damage = _read_mark(Path(checkpoint, PACKING_STATE))
    if damage:
        raise UserError(f"--resume_from_checkpoint {checkpoint}: no complete checkpoint: {damage}")
    return state


# --- writing


def remove(folder: Path) -> None:
    """Remove a checkpoint, complete or not, its mark first and on disk; nothing happens where there is none."""
    with contextlib.suppress(FileNotFoundError):
        (folder / PACKING_STATE).unlink()
        _sync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def mark(folder: Path, state: Mapping[str, Any]) -> None:
    """Declare a checkpoint complete: sync all its files, then write the mark, itself synced before it has its name.

    Args:
        state: what the mark holds besides the names and sizes of the files.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path != folder / PACKING_STATE:
            _sync(path)
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    for path in [folder, *(each for each in folder.rglob("*") if each.is_dir())]:
        _sync(path)
    temporary = folder / f"{PACKING_STATE}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({**state, FILES: files, SAVED_AT: time.time()}, file, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / PACKING_STATE)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that do not sync folders
            raise
    finally:
        os.close(fd)


def rotate(output_dir: str | Path, limit: int | None, keep: Path | None = None) -> None:
    """Remove the oldest checkpoints beyond `limit`; never the one that was marked last, nor `keep`.

    Folders without a mark count, as what a killed run left half-written or what holds a model only.
    """
    if not limit or limit < 1:
        return
    found = sorted(map(inspect, folders_of(output_dir)), key=lambda each: (each.saved_at, each.step))
    complete = [each for each in found if not each.damage]
    kept = {each.folder.resolve() for each in (complete[-1:] or found[-1:])}
    if keep is not None:
        kept.add(keep.resolve())
    too_many = len(found) - max(limit, len(kept))
    for each in [each for each in found if each.folder.resolve() not in kept][: max(0, too_many)]:
        remove(each.folder)


@contextlib.contextmanager
def writing_to(folder: str | Path) -> Iterator[None]:
    """A disk without space for what is written inside is one line, and nothing half-written stays.

    Raises:
        UserError: names the folder and its free bytes.
    """
    folder = Path(folder)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not _for_want_of_space(error, folder):
            raise
        free, removed = _free(folder), ""
        if step_of(folder) is not None:
            shutil.rmtree(folder, ignore_errors=True)
            removed = ", the half-written folder is removed"
        raise UserError(
            f"no space to write {folder}: {free:,} bytes were free{removed}; free some, lower --save_total_limit, or "
            "choose another --output_dir"
        ) from error


def _for_want_of_space(error: BaseException | None, folder: Path) -> bool:
    """Whether this, or what it came from, was raised for want of space. torch and safetensors say so in words only."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            return True
        if any(words in str(error) for words in ("No space left", "Disk quota exceeded", "os error 28")):
            return True
        if "PytorchStreamWriter failed" in str(error) and _free(folder) < 1 << 20:
            return True
        error = error.__cause__ or error.__context__
    return False


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def give_usual_modes(folder: str | Path) -> None:
    """Give files the modes of the umask: safetensors writes them for the owner only."""
    umask = os.umask(0)
    os.umask(umask)
    for path in Path(folder).iterdir():
        if path.is_file() and (path.stat().st_mode & 0o777) != (wanted := 0o666 & ~umask):
            with contextlib.suppress(PermissionError):
                path.chmod(wanted)


# --- going on


def make_universal(checkpoint: Path) -> None:
    """Convert DeepSpeed's shards to its universal format, which loads on any number of ranks.

    Writes `global_stepN_universal` beside `global_stepN`; done once, found again later.

    Raises:
        UserError: there are no shards, or DeepSpeed's converter fails; gives its last line.
    """
    latest = checkpoint / "latest"
    if not latest.is_file():
        raise UserError(f"--resume_from_checkpoint {checkpoint}: it holds no DeepSpeed state to move to other ranks")
    shards = checkpoint / latest.read_text().strip()
    universal = shards.with_name(f"{shards.name}_universal")
    if (checkpoint / "latest_universal").is_file() and universal.is_dir():
        return
    (checkpoint / "latest_universal").unlink(missing_ok=True)
    shutil.rmtree(universal, ignore_errors=True)  # half of it, of a conversion that was killed
    logger.warning("resume: converting %s to DeepSpeed's universal format, once", shards)
    # A process of its own: the converter is a program, and must not meet this run's process group.
    launched_by = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launched_by and not k.startswith("TORCHELASTIC")}
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(shards), "--output_folder", str(universal)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise UserError(f"--resume_from_checkpoint {checkpoint}: DeepSpeed cannot convert it: {lines[-1]}")


def compared_options(args: TrainingArguments, fp8: str | None) -> dict[str, Any]:
    """What `differences` compares, for the mark."""
    return {OPTIMIZER: {name: getattr(args, name) for name in OVERRULED}, FP8: fp8}


def differences(state: Mapping[str, Any], args: TrainingArguments, fp8: str | None) -> list[str]:
    """A line for each option of this run that the checkpoint's optimizer state overrules, and one where the decoder's
    products change their format (fp8); the weights are the same in all formats.

    Args:
        fp8: the recipe of this run, None for none.
    """
    lines = [
        f"--{name} {getattr(args, name)} is overruled by the checkpoint, which goes on with {saved}"
        for name, saved in state.get(OPTIMIZER, {}).items()
        if saved != getattr(args, name)
    ]
    if (recipe := state.get(FP8)) != fp8:
        before, after = (f"in fp8 ({each})" if each else "without fp8" for each in (recipe, fp8))
        lines.append(f"the decoder's products were made {before} until this checkpoint, from here on {after}")
    return lines
