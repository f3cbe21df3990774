"""New checkpoints from old ones: the average of their weights.

Decisions
- Averages are of weights only: an average of Adam's moments belongs to no trajectory. The result loads for generation and evaluation, and
  with --load-weights-only for training.
- The mean is taken in fp32, tensor by tensor while the result is written, so memory is bounded by two tensors.
- Everything that can be wrong is found before anything is written: other models, other tensors, damaged files.
- The manifest is that of the newest source, with the names of all sources in `made_of`.

Averaging the last checkpoints of a run: Izmailov et al. 2018 (stochastic weight averaging).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.files import check_contents
from megalite.checkpoint.lazy import LazyPlanner
from megalite.checkpoint.reading import TensorReader
from megalite.checkpoint.store import has_checkpoints, save_checkpoint
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis

__all__ = ["average_checkpoints"]

_WEIGHTS = "model."
_MOST_SHOWN = 10


def average_checkpoints(checkpoints: Sequence[Path], out: Path) -> Path:
    """Write the mean of the checkpoints' weights below `out`, a folder without checkpoints, and return its path.

    Raises ConfigError for fewer than two checkpoints or a folder in use, CheckpointError for damaged ones or other models.
    """
    if len({path.resolve() for path in checkpoints}) < 2:
        raise ConfigError(f"an average needs two different checkpoints or more, {len(checkpoints)} given: {_listed(checkpoints)}")
    if out.exists() and (not out.is_dir() or has_checkpoints(out)):
        raise ConfigError(f"{out} exists and is not a folder without checkpoints; give --out another path")
    readers = sorted((TensorReader(path) for path in checkpoints), key=lambda reader: reader.manifest.step)
    for reader in readers:
        check_contents(reader.checkpoint, reader.manifest.files, Axis.single("world"))
    newest = readers[-1]
    for other in readers[:-1]:
        _check_same_model(newest, other)
    tables = {name: dict(facts) for name, facts in newest.manifest.tensors.items() if name.startswith(_WEIGHTS)}
    if not tables:
        raise CheckpointError(f"{newest.checkpoint} holds no weights")
    planned = {name: _planned(newest, name) for name in tables}
    manifest = replace(
        newest.manifest,
        tensors={name: {"shape": facts["shape"], "dtype": facts["dtype"]} for name, facts in tables.items()},
        layout={},
        made_of=[str(reader.checkpoint) for reader in readers],
    )
    planner = LazyPlanner(lambda name: _mean(readers, name))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)  # one process is what is meant
        return save_checkpoint(out, planned, manifest, Axis.single("world"), planner=planner)


def _planned(reader: TensorReader, name: str) -> Tensor:
    facts = reader.stored_facts(name)
    return torch.empty(facts.size, dtype=facts.properties.dtype, device="meta")


def _mean(readers: Sequence[TensorReader], name: str) -> Tensor:
    first = readers[0].read(name)
    total = first.float()
    for reader in readers[1:]:
        total += reader.read(name)
    return (total / len(readers)).to(first.dtype)


def _check_same_model(newest: TensorReader, other: TensorReader) -> None:
    """Raises CheckpointError with what is not the same."""
    a, b = newest.manifest, other.manifest
    settings = [a.config.get("model") or {}, b.config.get("model") or {}]
    found = [
        f"model setting {key} is {settings[1].get(key)!r} and {settings[0].get(key)!r}"
        for key in sorted(settings[0].keys() | settings[1].keys())
        if settings[0].get(key) != settings[1].get(key)
    ]
    facts = [
        {name: (facts["shape"], facts["dtype"]) for name, facts in manifest.tensors.items() if name.startswith(_WEIGHTS)}
        for manifest in (a, b)
    ]
    found += [
        f"{name} is {facts[1].get(name, 'missing')} and {facts[0].get(name, 'missing')}"
        for name in sorted(facts[0].keys() | facts[1].keys())
        if facts[0].get(name) != facts[1].get(name)
    ]
    if found:
        listed = "\n  ".join(found[:_MOST_SHOWN] + ([f"... {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []))
        raise CheckpointError(f"{other.checkpoint} and {newest.checkpoint} are different models and have no average:\n  {listed}")


def _listed(paths: Sequence[Path]) -> str:
    return ", ".join(map(str, paths)) or "none"
