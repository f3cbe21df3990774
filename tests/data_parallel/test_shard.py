"""Every strategy trains like one rank, and holds no stale weights."""

from __future__ import annotations

import pytest
import torch

from megalite.config import OptimConfig
from megalite.data_parallel.shard import sharded_modules
from megalite.grid import Grid
from megalite.optim import Optimizer, check_replicas, clip_grads_, finalize_grads, global_names, grad_norm
from tests.data_parallel import toy
from tests.ranks import run_ranks

PER_RANK, STEPS, LR = 3, 3, 0.02
CONFIG = OptimConfig(adam_eps=1e-3)  # Adam divides by roots of squares: with a tiny eps, rounding of tiny gradients would show


def layout(zero: int, dp: int, tp: int) -> dict[str, int]:
    return {"dp_replicate": dp, "tp": tp} if zero == 0 else {"dp_shard": dp, "tp": tp}


def train_both(grid: Grid, zero: int, num_stages: int, in_flight: int, evaluate: str) -> dict[str, float]:
    """Three steps of the wrapped and of the plain model; the largest differences that were seen."""
    stages = toy.build(grid, zero, numbers=range(num_stages), num_stages=num_stages)
    plain = toy.build_plain()
    parameters = toy.parameters_of(stages)
    reference = toy.collect_parameters([plain])
    optimizers = Optimizer(parameters, CONFIG), Optimizer(reference, CONFIG)
    names = global_names(parameters, grid)
    worst = {"loss": 0.0, "gradient": 0.0, "norm": 0.0}
    for step in range(STEPS):
        batches = toy.microbatches(PER_RANK * grid.dp.size, step)
        divisor = len(batches) * toy.S * toy.B
        if evaluate == "before the forward":
            worst["loss"] = max(worst["loss"], evaluation_difference(stages, plain, batches[0]))
        toy.train(stages, toy.share(batches, grid), divisor, zero, in_flight)
        finalize_grads(parameters, grid)
        expected = toy.plain_gradients(plain, batches, divisor)
        worst["gradient"] = max(worst["gradient"], toy.worst_gradient(parameters, expected))
        norm = grad_norm(parameters, names, grid)
        dense = torch.cat([grad.flatten() for grad in expected.values()]).norm()
        worst["norm"] = max(worst["norm"], toy.relative_difference(norm, dense))
        if evaluate == "before the step":
            worst["loss"] = max(worst["loss"], evaluation_difference(stages, plain, batches[0]))
        for optimizer, group in zip(optimizers, (parameters, reference), strict=True):
            clip_grads_(group, dense, 0.5 * dense.item())
            optimizer.step(LR)
            optimizer.zero_grad()
    worst["parameter"] = toy.worst_value(parameters, plain)
    worst["replicas that differ"] = len(check_replicas(parameters, grid))
    return worst


def evaluation_difference(stages: dict, plain: toy.ToyStage, batch: torch.Tensor) -> float:
    with torch.no_grad():
        x = None
        for stage in stages.values():
            x = stage(x, batch)
        return toy.relative_difference(x, plain(None, batch))


def train_all_levels(dp: int, tp: int) -> dict[str, dict[str, float]]:
    results = {}
    for zero in range(4):
        grid = toy.grid_of(**layout(zero, dp, tp))
        cases = [(1, PER_RANK, "before the forward"), (2, 2, "before the step")] + [(2, 1, "")] * (tp == 1)
        for num_stages, in_flight, evaluate in cases:
            label = f"zero {zero}, {num_stages} stages, {in_flight} in flight"
            results[label] = train_both(grid, zero, num_stages, in_flight, evaluate)
    return results


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (3, 1), (3, 2)])
def test_trains_like_one_rank(dp: int, tp: int) -> None:
    for results in run_ranks(train_all_levels, dp * tp, dp, tp, timeout=120):
        for label, worst in results.items():
            assert worst.pop("replicas that differ") == 0, label
            assert all(value < 1e-5 for value in worst.values()), (label, worst)
            assert worst["parameter"] < 1e-6, (label, worst)


def train_hybrid(zero: int) -> dict[str, float]:
    return train_both(toy.grid_of(dp_replicate=2, dp_shard=2), zero, 1, 2, "before the step")


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_hybrid_sharding_trains_like_one_rank(zero: int) -> None:
    for worst in run_ranks(train_hybrid, 4, zero):
        assert all(value < 1e-5 for value in worst.values()), worst


def gathered_after(zero: int) -> dict[str, bool]:
    """Whether the stage's parameters are other objects than the slices that the optimizer changes."""
    grid = toy.grid_of(**layout(zero, 2, 1))
    stages = toy.build(grid, zero)
    slices = {id(p.parameter) for p in toy.parameters_of(stages)}

    def is_gathered() -> bool:
        return any(id(parameter) not in slices for parameter in stages[0].parameters())

    batches, found = toy.share(toy.microbatches(4, 0), grid), {}
    with torch.no_grad():
        stages[0](None, batches[0])
    found["evaluation"] = is_gathered()
    loss = stages[0](None, batches[0])
    found["forward"] = is_gathered()
    sync = toy.GradientSync(stages, zero)
    for number in range(2):
        sync.before_backward(0, is_last=number == 1)
        loss.backward()
        found[f"backward {number}"] = is_gathered()
        if number == 0:
            loss = stages[0](None, batches[1])
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_weights_are_gathered_only_as_long_as_the_strategy_says(zero: int) -> None:
    for found in run_ranks(gathered_after, 2, zero):
        kept = zero < 3
        assert found == {"evaluation": False, "forward": kept, "backward 0": kept, "backward 1": False}


def one_rank_in_fp32() -> tuple[int, bool]:
    grid = toy.grid_of()
    stage = toy.build(grid, 0)[0]
    plain = dict(toy.build_plain().named_parameters())
    same = all(type(p) is torch.nn.Parameter and p.equal(plain[name]) for name, p in stage.named_parameters())
    return len(sharded_modules(stage)) + len(stage._forward_hooks), same


def test_one_rank_in_fp32_is_not_wrapped() -> None:
    assert run_ranks(one_rank_in_fp32, 1) == [(0, True)]


def tied_on_one_stage(zero: int) -> dict[str, float]:
    grid = toy.grid_of(**layout(zero, 2, 1))
    stages, plain = toy.build(grid, zero, tied=True), toy.build_plain(tied=True)
    parameters = toy.parameters_of(stages)
    batches = toy.microbatches(6, 0)
    toy.train(stages, toy.share(batches, grid), 60, zero, 2)
    expected = toy.plain_gradients(plain, batches, 60)
    norm = grad_norm(parameters, global_names(parameters, grid), grid)
    dense = torch.cat([grad.flatten() for grad in expected.values()]).norm()
    return {"gradient": toy.worst_gradient(parameters, expected), "norm": toy.relative_difference(norm, dense)}


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_tied_weight_of_one_stage_belongs_to_the_root(zero: int) -> None:
    for worst in run_ranks(tied_on_one_stage, 2, zero):
        assert all(value < 1e-5 for value in worst.values()), worst
