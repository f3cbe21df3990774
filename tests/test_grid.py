"""The process grid: arithmetic of big layouts without processes, and the groups of small ones."""

from __future__ import annotations

from datetime import timedelta
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.errors import ConfigError
from megalite.grid import AXES, Axis, Grid, GridShape
from tests.ranks import run_ranks

BIG = [
    GridShape(pp=8, dp_shard=16, tp=8),
    GridShape(pp=4, dp_replicate=2, dp_shard=8, cp=2, tp=8),
    GridShape(dp_shard=1024),
    GridShape(pp=16, tp=64),
]
SUBSETS = [axes for count in range(1, len(AXES) + 1) for axes in combinations(AXES, count)]


@pytest.mark.parametrize("shape", BIG, ids=str)
def test_coordinates_and_ranks_are_inverse(shape: GridShape) -> None:
    assert shape.world_size == 1024
    for rank in range(1024):
        coords = shape.coords_of(rank)
        assert tuple(coords) == AXES
        assert all(0 <= coords[name] < getattr(shape, name) for name in AXES)
        assert shape.rank_of(**coords) == rank


@pytest.mark.parametrize("axes", SUBSETS, ids=lambda axes: "-".join(axes))
@pytest.mark.parametrize("shape", BIG[:2], ids=str)
def test_lines_partition_the_ranks(shape: GridShape, axes: tuple[str, ...]) -> None:
    lines = shape.lines(*axes)
    assert sorted(rank for line in lines for rank in line) == list(range(1024))
    for line in lines:
        assert line == sorted(line)
        fixed = [{name: shape.coords_of(rank)[name] for name in AXES if name not in axes} for rank in line]
        assert all(coords == fixed[0] for coords in fixed)
        assert shape.line_of(line[-1], *axes) == line


def test_tp_is_fastest_and_pp_slowest() -> None:
    shape = BIG[1]
    assert shape.lines("tp")[:2] == [list(range(8)), list(range(8, 16))]
    assert shape.lines("pp")[0] == [0, 256, 512, 768]
    assert shape.line_of(0, "dp_shard") == list(range(0, 128, 16))
    assert shape.line_of(0, "dp_replicate") == [0, 128]
    assert shape.line_of(5, "dp_replicate", "dp_shard") == list(range(5, 256, 16))
    assert shape.dp == 16


def test_sizes_below_one_are_listed_together() -> None:
    with pytest.raises(ConfigError, match=r"pp is 0") as caught:
        GridShape(pp=0, tp=-2)
    assert len(caught.value.violations) == 2


def test_a_single_axis_needs_no_processes() -> None:
    axis = Axis.single("dp")
    assert (axis.name, axis.size, axis.rank, axis.ranks, axis.group) == ("dp", 1, 0, (0,), None)
    assert axis.is_first
    assert axis.is_last


def lines_of_rank(shape: GridShape) -> None:
    grid = Grid.build(shape, timeout=timedelta(seconds=30))
    rank = dist.get_rank()
    for name in AXES:
        axis = getattr(grid, name)
        assert axis.name == name
        assert list(axis.ranks) == shape.line_of(rank, name)
        assert_group_is_the_line(axis, rank)
        assert axis.mesh is not None
        assert axis.mesh.mesh.tolist() == list(axis.ranks)
    assert list(grid.dp.ranks) == shape.line_of(rank, "dp_replicate", "dp_shard")
    assert_group_is_the_line(grid.dp, rank)
    assert list(grid.world.ranks) == list(range(shape.world_size))
    ends = [grid.pp.ranks[0], grid.pp.ranks[-1]]
    if grid.pp.size == 1:
        assert (grid.embedding.size, grid.embedding.rank) == (1, 0)
    else:
        assert list(grid.embedding.ranks) == ends
        if rank in ends:
            assert_group_is_the_line(grid.embedding, rank)
        else:
            assert (grid.embedding.rank, grid.embedding.group) == (-1, None)


def assert_group_is_the_line(axis: Axis, rank: int) -> None:
    assert axis.ranks[axis.rank] == rank
    value = torch.tensor(float(2**rank))
    dist.all_reduce(value, group=axis.group)
    assert value.item() == sum(2**other for other in axis.ranks)


@pytest.mark.parametrize(
    "shape",
    [
        GridShape(),
        GridShape(tp=2),
        GridShape(pp=3),
        GridShape(pp=2, tp=2),
        GridShape(dp_replicate=2, dp_shard=2),
        GridShape(pp=2, dp_shard=2, tp=2),
    ],
    ids=str,
)
def test_every_axis_has_the_group_of_its_line(shape: GridShape) -> None:
    run_ranks(lines_of_rank, shape.world_size, shape)


def groups_in_turn(shape: GridShape) -> list[tuple[int, ...]]:
    """The ranks of every group that this rank makes, in order."""
    made, original = [], dist.new_group

    def note(ranks: list[int], **settings: Any) -> Any:
        made.append(tuple(ranks))
        return original(ranks, **settings)

    dist.new_group = note  # type: ignore[assignment]
    try:
        Grid.build(shape)
    finally:
        dist.new_group = original
    return made


@pytest.mark.parametrize("shape", [GridShape(pp=4), GridShape(pp=3, tp=2), GridShape(dp_replicate=2, dp_shard=2)], ids=str)
def test_all_ranks_make_their_groups_together(shape: GridShape) -> None:
    """What gloo would forgive and NCCL would not: a rank that leaves a turn out while others split the world."""
    turns = list(zip(*run_ranks(groups_in_turn, shape.world_size, shape), strict=True))
    assert len(turns) == len(AXES) + 1
    for lines in turns:
        assert sorted(rank for line in set(lines) for rank in line) == list(range(shape.world_size))
        assert all(rank in line for rank, line in enumerate(lines))


def build_too_big() -> None:
    with pytest.raises(ConfigError, match=r"pp 3 .* tp 1 needs 3 ranks, but 2 were launched"):
        Grid.build(GridShape(pp=3))


def test_a_layout_of_another_size_is_refused() -> None:
    run_ranks(build_too_big, 2)
