"""One changed bit on one rank is found, over the axis that it differs on, and named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalite.grid import Grid, GridShape
from megalite.optim import check_replicas, collect_parameters
from megalite.tensor_parallel.parameter import ParameterInfo, add_parameter
from tests.ranks import run_ranks


def lines_after_spoiling(shape: GridShape, name: str) -> tuple[list[str], list[str]]:
    """What is found before and after the last rank changes the last bit of its first element of `name`."""
    grid = Grid.build(shape)
    module = nn.Module()
    for each, shard_dim in (("cut", 0), ("whole", None)):
        info = ParameterInfo(role="linear", init="ones")
        add_parameter(module, each, (4, 3), tp=grid.tp, shard_dim=shard_dim, info=info, device="cpu")
    parameters = collect_parameters([module])
    for p in parameters:
        p.local.fill_(-0.5)
    p.local[-1, -1] = torch.nan  # equal bits, though unequal as a number
    before = check_replicas(parameters, grid)
    if grid.rank == grid.world_size - 1:
        next(p for p in parameters if p.name == name).local[0, :1].view(torch.int32).bitwise_xor_(1)
    return before, check_replicas(parameters, grid)


@pytest.mark.parametrize(
    ("shape", "name", "lines"),
    [
        (GridShape(dp_replicate=2), "cut", ["cut differs over dp_replicate (ranks 0, 1)"]),
        (GridShape(tp=2), "whole", ["whole differs over tp (ranks 0, 1)"]),
        (GridShape(tp=2), "cut", []),  # another part on each rank
        (GridShape(dp_shard=2), "whole", []),  # another slice on each rank, once data parallelism has cut it
    ],
    ids=str,
)
def test_a_changed_bit_is_found_where_replicas_should_agree(shape: GridShape, name: str, lines: list[str]) -> None:
    assert run_ranks(lines_after_spoiling, 2, shape, name) == [([], lines)] * 2
