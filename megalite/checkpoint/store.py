"""Saves and loads logical tensors through `torch.distributed.checkpoint` (DCP): any layout loads any checkpoint.

Decisions
- Keys are logical names with global layer numbers; values are plain tensors or DTensors, whose placements tell DCP what this rank holds.
- A checkpoint becomes visible whole or not at all: it is written to a temporary directory (DCP syncs its files), gets its manifest,
  is renamed to `step-NNNNNNN`, and `latest` is rewritten last.
- A file that is missing or cut short makes its checkpoint incomplete, and one with changed bytes is refused (`files.py`).
- `latest` is for people and scripts: loading takes the newest complete checkpoint, and says so where `latest` names another one.
- Loading is strict both ways: missing and extra names, shapes and dtypes are listed together before anything is read.
  Only optimizer state may have another dtype than the run's, to which it is converted.
- DCP's exception derives from BaseException and would slip through `except Exception`; it becomes a CheckpointError here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megalite import comm
from megalite.checkpoint.files import check_contents, describe_files, size_problems
from megalite.checkpoint.hashes import content_hashes, with_hashes
from megalite.checkpoint.lazy import LazyPlanner
from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, sync_directory, write_atomically
from megalite.errors import CheckpointError
from megalite.grid import Axis
from megalite.log import get_logger

__all__ = [
    "complete_checkpoints",
    "find_checkpoint",
    "has_checkpoints",
    "load_tensors",
    "newest_checkpoint",
    "save_checkpoint",
    "step_directories",
    "step_directory",
    "step_of",
]

_LATEST = "latest"
_PREFIX = "step-"
_MOST_SHOWN = 40
T = TypeVar("T")


def step_directory(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:07d}"


def step_of(checkpoint: Path) -> int:
    """The step in the name of a `step_directory`."""
    return int(checkpoint.name.removeprefix(_PREFIX))


def save_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    manifest: Manifest,
    world: Axis,
    *,
    hash_tensors: bool = True,
    planner: LazyPlanner | None = None,
) -> Path:
    """Write one checkpoint below `directory` and return its path. Collective over `world`.

    tensors: this rank's part under logical names; several ranks may hold the same tensor, which is then written once.
    hash_tensors: put a hash of every tensor's content into the manifest (`hashes.py`).
    planner: makes the values of `tensors`, which are on the meta device then, one after another while they are written.
    Raises CheckpointError; checkpoints that were there before are not touched.
    """
    target = step_directory(directory, manifest.step)
    temporary = directory / f".{target.name}.tmp"
    _on_first_rank(world, lambda: _make_empty(temporary), f"cannot make {temporary}")
    try:
        _write(temporary, target, tensors, world, planner)
        if planner is not None:
            hashes = planner.hashes
        else:
            hashes = content_hashes(tensors, world) if hash_tensors else {}
        whole = replace(manifest, tensors=with_hashes(manifest.tensors, hashes), files=describe_files(temporary, world))
        _on_first_rank(world, lambda: _publish(temporary, target, whole), f"cannot finish {target}")
    except CheckpointError:
        if world.is_first:  # every rank has failed, so none writes any more
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _write(temporary: Path, target: Path, tensors: Mapping[str, Tensor], world: Axis, planner: LazyPlanner | None) -> None:
    try:
        writer = None if planner is None else planner.storage_writer(temporary)
        dcp.save(dict(tensors), checkpoint_id=str(temporary), storage_writer=writer, planner=planner, process_group=world.group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"saving {target} failed: {_reasons(error)}; older checkpoints are as they were") from error


def _make_empty(directory: Path) -> None:
    if directory.exists():  # left over from a run that died while saving
        shutil.rmtree(directory)
    directory.mkdir(parents=True)


def _publish(temporary: Path, target: Path, manifest: Manifest) -> None:
    write_atomically(temporary / MANIFEST_NAME, manifest.to_json())
    if target.exists():  # the same step saved again, for example after a resume from an older one
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        os.replace(target, old)
        os.replace(temporary, target)
        shutil.rmtree(old)
    else:
        os.replace(temporary, target)
    sync_directory(target.parent)
    write_atomically(target.parent / _LATEST, target.name + "\n")


def _on_first_rank(world: Axis, action: Callable[[], T], failure: str) -> T:
    """Run `action` on the first rank; every rank gets its value, or a CheckpointError."""
    value, error = None, None
    if world.is_first:
        try:
            value = action()
        except CheckpointError as caught:
            error = str(caught)
        except OSError as caught:
            error = f"{failure}: {caught}"
    value, error = comm.broadcast_object((value, error), world)
    if error is not None:
        raise CheckpointError(error)
    return value


def find_checkpoint(path: Path, world: Axis, *, on_damage: str = "stop") -> Path:
    """`newest_checkpoint` as the first rank sees it, with the contents that were written. Collective over `world`.

    on_damage: "older" passes over a checkpoint with changed bytes, with a warning. Raises CheckpointError on every rank: where there is
    no checkpoint left, or with "stop" for a damaged one, naming its files and the one that could be taken instead.
    """
    damaged: list[Path] = []
    while True:
        found = _on_first_rank(world, lambda: newest_checkpoint(path, passed_over=damaged), f"cannot read {path}")
        try:
            check_contents(found, read_manifest(found).files, world)
        except CheckpointError as error:
            older = [one for one in complete_checkpoints(path) if one not in (*damaged, found)] if found != path else []
            if on_damage == "stop" or not older:
                instead = f"; {older[0]} is older and complete: --load it, or --on-damaged-checkpoint older" if older else ""
                raise CheckpointError(f"{error}{instead}") from error
            get_logger().warning(f"passed over {found}: {error}")
            damaged.append(found)
            continue
        return found


def newest_checkpoint(path: Path, passed_over: Sequence[Path] = ()) -> Path:
    """The checkpoint that `path` means: itself, or the newest complete one below it that is not in `passed_over`; says which were
    incomplete.

    Raises CheckpointError when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; --load takes a checkpoint or the directory that --save was given")
    if _is_one(path):
        return path
    candidates = [candidate for candidate in step_directories(path) if candidate not in passed_over]
    for candidate in candidates:
        problem = _incomplete(candidate)
        if problem is None:
            _mention_latest(path, candidate)
            return candidate
        get_logger().warning(f"passed over {candidate}: {problem}")
    raise CheckpointError(f"{path} holds no complete checkpoint ({len(candidates)} incomplete); was --save pointed there?")


def has_checkpoints(path: Path) -> bool:
    """Whether there is anything at `path` that looks like a checkpoint, complete or not."""
    return path.is_dir() and (_is_one(path) or bool(step_directories(path)))


def _is_one(path: Path) -> bool:
    """A checkpoint itself, not a folder of them; where it has lost its manifest, reading it says so."""
    return (path / MANIFEST_NAME).exists() or (path / ".metadata").exists()


def complete_checkpoints(directory: Path) -> list[Path]:
    """Complete checkpoints below `directory`, newest first; none where it does not exist."""
    return [candidate for candidate in step_directories(directory) if _incomplete(candidate) is None]


def step_directories(directory: Path) -> list[Path]:
    """Checkpoints below `directory`, complete or not, newest first.

    Numbers are compared as numbers: the eighth digit makes a name longer, not smaller.
    """
    found = [entry for entry in directory.glob(f"{_PREFIX}*") if entry.is_dir() and entry.name[len(_PREFIX) :].isdecimal()]
    return sorted(found, key=lambda entry: int(entry.name[len(_PREFIX) :]), reverse=True)


def _incomplete(checkpoint: Path) -> str | None:
    """Why `checkpoint` cannot be loaded, as far as can be told without reading its tensors; None where it can."""
    try:
        problems = size_problems(checkpoint, read_manifest(checkpoint).files)
    except CheckpointError as error:
        return str(error)
    return "; ".join(problems) or None


def _mention_latest(directory: Path, taken: Path) -> None:
    try:
        latest = (directory / _LATEST).read_text().strip()
    except (OSError, ValueError):
        return  # nothing depends on it
    if latest != taken.name:
        get_logger().warning(f"{directory / _LATEST} names {latest}, but {taken.name} is the newest complete checkpoint and is taken")


def load_tensors(
    checkpoint: Path, tensors: Mapping[str, Tensor], *, pp: Axis, world: Axis, ignore: tuple[str, ...] = (), is_checked: bool = False
) -> None:
    """Fill `tensors` in place from `checkpoint`. Collective over `world`.

    All ranks of a pipeline line together must name exactly the tensors of the checkpoint, except those whose names begin with one of
    `ignore`. is_checked: the contents of the files were compared with the manifest already.
    Raises CheckpointError with all differences, or naming the files that are damaged.
    """
    manifest = read_manifest(checkpoint)
    wanted: dict[str, dict] = {}
    for part in comm.all_gather_object({name: describe(tensor) for name, tensor in tensors.items()}, pp):
        wanted.update(part)
    stored = {name: facts for name, facts in manifest.tensors.items() if not name.startswith(ignore)}
    differences = _differences(wanted, stored)
    if stored.keys() == {name for name in wanted if not name.startswith("optimizer.")} != wanted.keys():
        remedy = "--load-weights-only takes the weights and starts with a fresh optimizer"
        raise CheckpointError(f"{checkpoint} holds no optimizer state: {remedy}")
    if differences:
        hidden = len(differences) - _MOST_SHOWN
        listed = "\n  ".join(differences[:_MOST_SHOWN] + ([f"... {hidden} more"] if hidden > 0 else []))
        raise CheckpointError(f"{checkpoint} does not fit this model in {len(differences)} places:\n  {listed}")
    if not is_checked:
        check_contents(checkpoint, manifest.files, world)
    try:
        dcp.load(dict(tensors), checkpoint_id=str(checkpoint))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"loading {checkpoint} failed: {_reasons(error)}") from error


def _reasons(error: BaseException) -> str:
    """The ranks' errors in a line each, without the checkpoint library's tracebacks."""
    if not isinstance(error, CheckpointException):
        return str(error)
    return "; ".join(f"rank {rank}: {type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items()))


def describe(tensor: Tensor) -> dict:
    """Shape (global) and dtype as the manifest has them."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _differences(wanted: Mapping[str, dict], stored: Mapping[str, dict]) -> list[str]:
    lines = [f"{name}: missing from the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    lines += [f"{name}: in the checkpoint, but not in the model" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        # Moments are kept in a format of choice, and reading converts them.
        for fact in ("shape",) if name.startswith("optimizer.") else ("shape", "dtype"):
            if wanted[name][fact] != stored[name][fact]:
                lines.append(f"{name}: {fact} {stored[name][fact]} in the checkpoint, {wanted[name][fact]} in the model")
    about_weights = [line for line in lines if line.startswith("model.")]
    return about_weights or lines  # optimizer state differs where weights do; saying it once is enough
