"""bf16: weights are cast for the computation only; master weights, gradients, sums and reductions are fp32."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from megalite.data_parallel import shard_stage
from tests.data_parallel import toy
from tests.ranks import run_ranks

NUM_BATCHES = 6


def bf16_gradients(batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Plain bf16 gradients of each micro-batch, added in fp32."""
    plain = toy.build_plain()
    sums = {}
    for batch in batches:
        casted = copy.deepcopy(plain).to(torch.bfloat16)
        for name, grad in toy.plain_gradients(casted, [batch], 1).items():
            assert grad.dtype == torch.bfloat16
            sums[name] = sums.get(name, 0.0) + grad.float()
    return sums


def compare(sizes: dict[str, int], zero: int) -> dict:
    grid = toy.grid_of(**sizes)
    stages = toy.build(grid, zero, dtype=torch.bfloat16)
    parameters, batches = toy.parameters_of(stages), toy.microbatches(NUM_BATCHES, 0)
    seen = []
    stages[0].layers["1"].register_forward_hook(lambda _, args, out: seen.append((args[0].dtype, out.dtype)))
    toy.train(stages, toy.share(batches, grid), 1, zero, 2)
    exact = bf16_gradients(batches)
    plain = dict(toy.build_plain().named_parameters())
    return {
        "master": all(toy.full(p.parameter.detach()).equal(plain[p.name]) for p in parameters),
        "dtypes": {p.parameter.dtype for p in parameters} | {p.local_grad.dtype for p in parameters},
        "activations": set(seen),
        "worst": max(toy.relative_difference(toy.full(p.parameter.grad), exact[p.name]) for p in parameters),
    }


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_everything_but_the_computation_is_fp32(dp: int, zero: int) -> None:
    for found in run_ranks(compare, dp, {"dp_replicate" if zero == 0 else "dp_shard": dp}, zero):
        assert found["master"]
        assert found["dtypes"] == {torch.float32}
        assert found["activations"] == {(torch.bfloat16, torch.bfloat16)}
        # the same bf16 gradients, added in fp32: only the order of additions differs (bf16 sums would be off by 1e-3)
        assert found["worst"] < 1e-6


def reduced_in_bf16(sizes: dict[str, int], zero: int) -> tuple[float, set[torch.dtype]]:
    """Worst relative difference to the plain fp32 gradients, types of parameters and gradients."""
    grid = toy.grid_of(**sizes)
    stages = toy.build(grid, zero, reduce_dtype=torch.bfloat16)
    parameters, batches = toy.parameters_of(stages), toy.microbatches(NUM_BATCHES, 0)
    toy.train(stages, toy.share(batches, grid), 1, zero, 2)
    exact = toy.plain_gradients(toy.build_plain(), batches, 1)
    types = {p.parameter.dtype for p in parameters} | {p.local_grad.dtype for p in parameters}
    return toy.worst_gradient(parameters, exact), types


@pytest.mark.parametrize(
    ("sizes", "zero"), [({"dp_replicate": 2}, 0), ({"dp_shard": 2}, 1), ({"dp_shard": 2}, 3), ({"dp_replicate": 2, "dp_shard": 2}, 2)]
)
def test_sums_over_ranks_in_bf16_are_close(sizes: dict[str, int], zero: int) -> None:
    for worst, types in run_ranks(reduced_in_bf16, 2 if len(sizes) == 1 else 4, sizes, zero):
        assert 1e-4 < worst < 2e-2  # fp32 sums differ by 1e-6: the setting is used
        assert types == {torch.float32}


def test_a_lone_rank_sums_in_fp32() -> None:
    ((worst, _),) = run_ranks(reduced_in_bf16, 1, {}, 1)
    assert worst < 1e-6


class Scaled(nn.Module):
    """x * weight * mask; notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.seen += [self.weight.dtype, x.dtype, mask.dtype]
        return x * self.weight * mask


def types_inside() -> tuple[list[torch.dtype], torch.dtype]:
    stage = Scaled()
    shard_stage(stage, [], toy.grid_of(), zero=1, compute_dtype=torch.bfloat16, materialize=lambda prefix, module: None)
    out = stage(torch.ones(3, dtype=torch.bfloat16), torch.ones(3))
    return stage.seen, out.dtype


def test_inputs_and_results_keep_their_type() -> None:
    ((inside, out),) = run_ranks(types_inside, 1)
    assert inside == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert out == torch.float32
