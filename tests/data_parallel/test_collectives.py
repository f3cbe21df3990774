"""What data parallelism sends: the table in `megalite/data_parallel/shard.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data_parallel import toy
from tests.ranks import run_ranks

M = 3
NUM_UNITS = 2 + toy.NUM_LAYERS
KINDS = {"allreduce": "all_reduce", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}


class Collectives(TorchDispatchMode):
    """Counts (kind, dtype) of what is handed to process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            kind = next((kind for part, kind in KINDS.items() if part in func.__name__), func.__name__)
            tensor = args[1] if kind in ("all_gather", "reduce_scatter") else args[0]
            while isinstance(tensor, list):
                tensor = tensor[0]
            self.found[kind, tensor.dtype] += 1
        return func(*args, **(kwargs or {}))


def count(sizes: dict[str, int], zero: int, in_flight: int, dtype: torch.dtype) -> list[Counter]:
    """Counts of an evaluation and of two training steps."""
    grid = toy.grid_of(**sizes)
    stages = toy.build(grid, zero, dtype=dtype)
    batches, results = toy.share(toy.microbatches(M * grid.dp.size, 0), grid), []
    with Collectives() as counted, torch.no_grad():
        stages[0](None, batches[0])
    results.append(counted.found)
    for _ in range(2):
        with Collectives() as counted:
            toy.train(stages, batches, 60, zero, in_flight)
        results.append(counted.found)
    return results


def expected(zero: int, sharded: bool, replicated: bool, dtype: torch.dtype) -> dict[tuple[str, torch.dtype], int]:
    counts = {}
    if sharded:
        counts["all_gather", dtype] = NUM_UNITS * (2 * M if zero == 3 else 1)
        counts["reduce_scatter", torch.float32] = NUM_UNITS * (M if zero >= 2 else 1)
    if replicated:
        counts["all_reduce", torch.float32] = NUM_UNITS
    return counts


@pytest.mark.parametrize(("in_flight", "dtype"), [(1, torch.float32), (M, torch.bfloat16)])
@pytest.mark.parametrize(
    ("zero", "sizes"),
    [
        (0, {"dp_replicate": 2}),
        (1, {"dp_shard": 2}),
        (2, {"dp_shard": 2}),
        (3, {"dp_shard": 2}),
        (1, {"dp_replicate": 2, "dp_shard": 2}),
        (2, {"dp_replicate": 2, "dp_shard": 2}),
        (3, {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_collectives_of_a_step(zero: int, sizes: dict[str, int], in_flight: int, dtype: torch.dtype) -> None:
    sharded, replicated = "dp_shard" in sizes, "dp_replicate" in sizes
    world_size = sizes.get("dp_shard", 1) * sizes.get("dp_replicate", 1)
    for evaluation, *steps in run_ranks(count, world_size, sizes, zero, in_flight, dtype):
        assert evaluation == ({("all_gather", dtype): NUM_UNITS} if sharded else {})
        for step in steps:
            assert step == expected(zero, sharded, replicated, dtype)
