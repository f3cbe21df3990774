"""Saves and loads logical tensors through `torch.distributed.checkpoint` (DCP): any layout loads any checkpoint.

Decisions
- Keys are logical names with global layer numbers; values are plain tensors or DTensors, whose placements tell DCP what this rank holds.
- A checkpoint becomes visible whole or not at all: it is written to a temporary directory (DCP syncs its files), gets its manifest,
  is renamed to `step-NNNNNNN`, and `latest` is rewritten last.
- Loading is strict both ways: missing and extra names, shapes and dtypes are listed together before anything is read.
- DCP's exception derives from BaseException and would slip through `except Exception`; it becomes a CheckpointError here.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from megalite import comm
from megalite.checkpoint.manifest import MANIFEST_NAME, Manifest, read_manifest, sync_directory, write_atomically
from megalite.errors import CheckpointError
from megalite.grid import Axis
from megalite.log import get_logger

__all__ = ["load_tensors", "newest_checkpoint", "save_checkpoint", "step_directory"]

_LATEST = "latest"
_PREFIX = "step-"
_MOST_SHOWN = 40


def step_directory(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:07d}"


def save_checkpoint(directory: Path, tensors: Mapping[str, Tensor], manifest: Manifest, world: Axis) -> Path:
    """Write one checkpoint below `directory` and return its path. Collective over `world`.

    tensors: this rank's part under logical names; several ranks may hold the same tensor, which is then written once.
    Raises CheckpointError; checkpoints that were there before are not touched.
    """
    target = step_directory(directory, manifest.step)
    temporary = directory / f".{target.name}.tmp"
    _on_first_rank(world, lambda: _make_empty(temporary), f"cannot make {temporary}")
    try:
        dcp.save(dict(tensors), checkpoint_id=str(temporary))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"saving {target} failed: {error}") from error
    _on_first_rank(world, lambda: _publish(temporary, target, manifest), f"cannot finish {target}")
    return target


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


def _on_first_rank(world: Axis, action, failure: str) -> None:
    """Run `action` on the first rank; every rank learns whether it worked."""
    error = None
    if world.is_first:
        try:
            action()
        except OSError as caught:
            error = str(caught)
    error = comm.broadcast_object(error, world)
    if error is not None:
        raise CheckpointError(f"{failure}: {error}")


def newest_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: itself, or the newest complete one below it; says which were passed over.

    Raises CheckpointError when there is none.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory; --load takes a checkpoint or the directory that --save was given")
    if (path / MANIFEST_NAME).exists():
        return path
    candidates = sorted((entry for entry in path.glob(f"{_PREFIX}*") if entry.is_dir()), reverse=True)
    for candidate in candidates:
        try:
            read_manifest(candidate)
        except CheckpointError as error:
            get_logger().warning(f"passed over {candidate}: {error}")
            continue
        return candidate
    raise CheckpointError(f"{path} holds no complete checkpoint ({len(candidates)} incomplete); was --save pointed there?")


def load_tensors(checkpoint: Path, tensors: Mapping[str, Tensor], *, pp: Axis, ignore: tuple[str, ...] = ()) -> None:
    """Fill `tensors` in place from `checkpoint`. Collective over the world.

    All ranks of a pipeline line together must name exactly the tensors of the checkpoint, except those whose names begin with one of
    `ignore`. Raises CheckpointError with all differences.
    """
    manifest = read_manifest(checkpoint)
    wanted: dict[str, dict] = {}
    for part in comm.all_gather_object({name: describe(tensor) for name, tensor in tensors.items()}, pp):
        wanted.update(part)
    stored = {name: facts for name, facts in manifest.tensors.items() if not name.startswith(ignore)}
    differences = _differences(wanted, stored)
    if differences:
        hidden = len(differences) - _MOST_SHOWN
        listed = "\n  ".join(differences[:_MOST_SHOWN] + ([f"... {hidden} more"] if hidden > 0 else []))
        raise CheckpointError(f"{checkpoint} does not fit this model in {len(differences)} places:\n  {listed}")
    try:
        dcp.load(dict(tensors), checkpoint_id=str(checkpoint))
    except (CheckpointException, OSError, RuntimeError) as error:
        raise CheckpointError(f"loading {checkpoint} failed: {error}") from error


def describe(tensor: Tensor) -> dict:
    """Shape (global) and dtype as the manifest has them."""
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


def _differences(wanted: Mapping[str, dict], stored: Mapping[str, dict]) -> list[str]:
    lines = [f"{name}: missing from the checkpoint" for name in sorted(wanted.keys() - stored.keys())]
    lines += [f"{name}: in the checkpoint, but not in the model" for name in sorted(stored.keys() - wanted.keys())]
    for name in sorted(wanted.keys() & stored.keys()):
        for fact in ("shape", "dtype"):
            if wanted[name][fact] != stored[name][fact]:
                lines.append(f"{name}: {fact} {stored[name][fact]} in the checkpoint, {wanted[name][fact]} in the model")
    about_weights = [line for line in lines if line.startswith("model.")]
    return about_weights or lines  # optimizer state differs where weights do; saying it once is enough
