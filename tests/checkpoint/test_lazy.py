"""A lazy save holds one tensor in memory at a time, and writes what it was given."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalite.checkpoint import Manifest, read_manifest, save_checkpoint
from megalite.checkpoint.compare import verify_checkpoint
from megalite.checkpoint.lazy import LazyPlanner
from megalite.checkpoint.reading import TensorReader
from megalite.checkpoint.store import describe
from megalite.errors import CheckpointError
from megalite.grid import Axis

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def save(folder: Path, planner: LazyPlanner) -> Path:
    planned: dict[str, Tensor] = {f"model.{number}": torch.empty(100, 7, device="meta") for number in range(4)}
    tables = {name: describe(tensor) for name, tensor in planned.items()}
    manifest = Manifest(step=3, consumed_samples=1, config={}, tensors=tables)
    return save_checkpoint(folder, planned, manifest, Axis.single("world"), planner=planner)


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    made: list[Tensor] = []
    in_memory: list[int] = []

    def make(name: str) -> Tensor:
        made.append(torch.full((100, 7), float(name.removeprefix("model."))))
        in_memory.append(sum(tensor.untyped_storage().nbytes() for tensor in made))
        return made[-1]

    path = save(tmp_path, LazyPlanner(make))
    assert in_memory == [2800] * 4, "what was written has given its memory back before the next one is made"
    reader = TensorReader(path)
    for number in range(4):
        assert torch.equal(reader.read(f"model.{number}"), torch.full((100, 7), float(number)))
    assert verify_checkpoint(path).num_hashed == len(read_manifest(path).tensors) == 4


def test_what_goes_wrong_while_a_tensor_is_made_leaves_nothing_behind(tmp_path: Path) -> None:
    def make(name: str) -> Tensor:
        raise CheckpointError(f"{name} of the source cannot be read")

    with pytest.raises(CheckpointError, match="of the source cannot be read"):
        save(tmp_path, LazyPlanner(make))
    assert list(tmp_path.iterdir()) == []
