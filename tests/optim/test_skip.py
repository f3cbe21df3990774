"""A skipped update leaves every bit as it was, whatever the gradients are, and the host may learn of it later."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from megalite.config import OptimConfig
from megalite.optim import Optimizer
from tests.data_parallel import toy

CONFIGS = {
    "adam": OptimConfig(),
    "adam, bf16 state": OptimConfig(exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "sgd": OptimConfig(optimizer="sgd"),
    "muon": OptimConfig(optimizer="muon"),
    "muon, bf16 state": OptimConfig(optimizer="muon", exp_avg_dtype="bf16", muon_dtype="bf16"),
}


def set_grads(stage: toy.ToyStage, step: int, value: float | None = None) -> None:
    toy_generator = torch.Generator().manual_seed(step)
    for parameter in stage.parameters():
        grad = torch.randn(parameter.shape, generator=toy_generator)
        parameter.grad = grad if value is None else torch.full_like(grad, value)


def everything(stage: toy.ToyStage, optimizer: Optimizer) -> dict[str, Tensor]:
    found = {f"model.{name}": parameter.detach().clone() for name, parameter in stage.named_parameters()}
    for name, moments in optimizer.named_state().items():
        found |= {f"{key}.{name}": moment.clone() for key, moment in moments.items()}
    counters = optimizer._rules["adam"][1]._counters.values() if "adam" in optimizer._rules else []  # type: ignore[attr-defined]
    return found | {f"counter.{number}": counter.clone() for number, counter in enumerate(counters)}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_skipped_update_changes_no_bit(config: OptimConfig, value: float | None) -> None:
    stage = toy.build_plain()
    optimizer = Optimizer(toy.collect_parameters([stage]), config)
    set_grads(stage, 0)
    optimizer.step(0.01)
    before = everything(stage, optimizer)
    set_grads(stage, 1, value)
    optimizer.step(0.01, torch.ones(()))
    assert all(found.equal(before[name]) for name, found in everything(stage, optimizer).items())
    assert optimizer.num_steps == 2
    optimizer.undo_step_count()
    assert optimizer.num_steps == 1


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_a_run_with_a_skipped_update_equals_one_that_never_tried_it(config: OptimConfig) -> None:
    stage = toy.build_plain()
    twin = copy.deepcopy(stage)
    optimizers = [Optimizer(toy.collect_parameters([each]), config) for each in (stage, twin)]
    for step in range(3):
        set_grads(stage, step)
        set_grads(twin, step)
        optimizers[0].step(0.01, torch.zeros(()))
        optimizers[1].step(0.01)
        set_grads(stage, 9, math.nan)
        optimizers[0].step(0.01, torch.ones(()))
    found, expected = everything(stage, optimizers[0]), everything(twin, optimizers[1])
    assert all(found[name].equal(expected[name]) for name in expected)


def test_more_updates_than_were_made_cannot_be_taken_back() -> None:
    optimizer = Optimizer(toy.collect_parameters([toy.build_plain()]), OptimConfig())
    with pytest.raises(AssertionError, match="1 of 0"):
        optimizer.undo_step_count()
