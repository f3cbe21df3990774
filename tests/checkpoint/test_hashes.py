"""The content hash of a tensor is the same however it is cut, and another one after any change."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megalite.checkpoint import Manifest, read_manifest, save_checkpoint
from megalite.checkpoint.hashes import content_hashes, hash_of
from megalite.checkpoint.store import describe
from megalite.grid import Axis, Grid, GridShape
from tests.ranks import run_ranks

SHAPES = [(7,), (9, 5), (4, 6, 3), (1, 70_001), (70_001,), ()]
"""Uneven over 2 ranks, and longer than what is hashed at a time."""


def values(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool])
def test_every_change_of_one_bit_or_place_changes_it(dtype: torch.dtype) -> None:
    tensor = values((11, 13), dtype)
    seen = {hash_of(tensor)}
    bits = tensor.view(torch.uint8)
    for place in range(0, bits.numel(), 7):
        changed = tensor.clone()
        changed.view(torch.uint8).view(-1)[place] ^= 1 if dtype == torch.bool else 128
        seen.add(hash_of(changed))
    assert len(seen) == 1 + len(range(0, bits.numel(), 7))
    ordered = torch.arange(143).view(11, 13).to(torch.float32)
    moved = [ordered, ordered.T.reshape(11, 13), ordered.flip(0), ordered.flip(1), ordered.roll(1, 0), ordered.roll(1, 1)]
    assert len({hash_of(one) for one in moved}) == len(moved)


def test_signs_and_empty_tensors() -> None:
    assert hash_of(torch.tensor([0.0])) != hash_of(torch.tensor([-0.0])), "bits count, not numbers"
    assert hash_of(torch.empty(0, 4)) == "0" * 16
    assert hash_of(values((6, 4)).T) == hash_of(values((6, 4)).T.contiguous()), "strides are no content"


def hashes_in_two_ranks() -> list[dict[str, str]]:
    """Every shape cut along every dimension, whole, and cut twice along the first. In every rank."""
    grid = Grid.build(GridShape(dp_shard=dist.get_world_size() // 2, tp=2))
    found = []
    for shape in SHAPES:
        whole = values(shape)
        kinds: list[Tensor] = [whole]
        for dim in range(len(shape)):
            kinds.append(distribute_tensor(whole, grid.mesh["dp_shard", "tp"], [Replicate(), Shard(dim)]))
            kinds.append(distribute_tensor(whole, grid.mesh["dp_shard", "tp"], [Shard(dim), Replicate()]))
        if len(shape) > 1:
            kinds.append(distribute_tensor(whole, grid.mesh["dp_shard", "tp"], [Shard(1), Shard(0)]))
        found.append(content_hashes({str(number): tensor for number, tensor in enumerate(kinds)}, grid.world))
    return found


def test_cuts_do_not_matter() -> None:
    ranks = run_ranks(hashes_in_two_ranks, 4)
    assert all(found == ranks[0] for found in ranks), "every rank knows all hashes"
    for shape, found in zip(SHAPES, ranks[0], strict=True):
        assert set(found.values()) == {hash_of(values(shape))}, shape


def hashes_of_unequal_copies() -> tuple[dict[str, str], list[str]]:
    grid, said = Grid.build(GridShape(dp_shard=2)), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megalite").addHandler(handler)
    copy = DTensor.from_local(torch.full((3,), float(grid.rank)), grid.mesh["dp_shard"], [Replicate()], run_check=False)
    found = content_hashes({"model.copy": copy, "model.same": torch.ones(3)}, grid.world)
    logging.getLogger("megalite").removeHandler(handler)
    return found, said


def test_copies_that_differ_get_no_hash_but_a_warning() -> None:
    for found, said in run_ranks(hashes_of_unequal_copies, 2):
        assert found == {"model.same": hash_of(torch.ones(3))}
        assert len(said) == 1 and "model.copy" in said[0] and "--check-replicas-interval" in said[0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_manifest_holds_them(tmp_path: Path) -> None:
    tensors = {"model.a": values((5, 3)), "optimizer.a.exp_avg": values((5, 3), torch.bfloat16)}
    named = {name: describe(tensor) for name, tensor in tensors.items()}
    path = save_checkpoint(tmp_path, tensors, Manifest(step=1, consumed_samples=2, config={}, tensors=named), Axis.single("world"))
    for name, tensor in tensors.items():
        assert read_manifest(path).tensors[name] == {**named[name], "hash": hash_of(tensor)}
    manifest = Manifest(step=2, consumed_samples=2, config={}, tensors=named)
    path = save_checkpoint(tmp_path, tensors, manifest, Axis.single("world"), hash_tensors=False)
    assert read_manifest(path).tensors == named
