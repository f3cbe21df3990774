"""AdamW: equal to torch's on one rank, groups by role, state that moves between layouts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megalite.config import OptimConfig
from megalite.optim import Optimizer, finalize_grads
from tests.data_parallel import toy
from tests.ranks import run_ranks

CONFIG = OptimConfig(weight_decay=0.3, adam_beta1=0.8, adam_beta2=0.97, adam_eps=1e-3)
RATES = [0.01, 0.03, 0.02]


def gradients(stage: toy.ToyStage, step: int) -> None:
    stage.zero_grad()
    toy.plain_gradients(stage, toy.microbatches(2, step), 20)


def test_equals_torch_adamw_with_decay_by_role() -> None:
    stage, twin = toy.build_plain(), toy.build_plain()
    optimizer = Optimizer(toy.collect_parameters([stage]), CONFIG)
    decayed = ("weight", "up", "down", "mix")
    groups = [{"params": [], "weight_decay": 0.3}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in twin.named_parameters():
        groups[0 if name.split(".")[-1] in decayed else 1]["params"].append(parameter)
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.97), eps=1e-3)
    for step, lr in enumerate(RATES):
        gradients(stage, step)
        gradients(twin, step)
        optimizer.step(lr)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
    for (name, found), expected in zip(stage.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=name)
    assert optimizer.num_steps == 3


def test_group_counts() -> None:
    optimizer = Optimizer(toy.collect_parameters([toy.build_plain()]), CONFIG)
    layers, h, f = toy.NUM_LAYERS, toy.H, toy.FFN
    decayed = layers * (2 * f * h + 2 * h) + 2 * toy.V * h  # padding rows of the two tables do not count
    assert optimizer.group_counts == {
        "decay": (3 * layers + 2, decayed),
        "no_decay": (3 * layers + 1, layers * (h + f + h) + h),
    }


def test_zero_gradients_still_decay_weights_but_not_norms() -> None:
    stage = toy.build_plain()
    before = copy.deepcopy(stage)
    optimizer = Optimizer(toy.collect_parameters([stage]), CONFIG)
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1)
    for (name, after), old in zip(stage.named_parameters(), before.parameters(), strict=True):
        factor = 1 - 0.1 * 0.3 if name.split(".")[-1] in ("weight", "up", "down", "mix") else 1.0
        torch.testing.assert_close(after, old * factor, msg=name)


def test_zero_grad_releases_gradients_and_a_missing_one_is_named() -> None:
    stage = toy.build_plain()
    optimizer = Optimizer(toy.collect_parameters([stage]), CONFIG)
    gradients(stage, 0)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in stage.parameters())
    with pytest.raises(AssertionError, match=r"embedding\.weight has no gradient"):
        optimizer.step(0.1)


def test_state_is_there_from_the_start_and_continues_with_the_same_bits() -> None:
    stage = toy.build_plain()
    optimizer = Optimizer(toy.collect_parameters([stage]), CONFIG)
    state = optimizer.named_state()
    assert list(state) == sorted(name for name, _ in stage.named_parameters())
    assert all(not moment.any() for moments in state.values() for moment in moments.values())
    gradients(stage, 0)
    optimizer.step(RATES[0])
    assert all(moment.any() for moments in state.values() for moment in moments.values())  # shares storage

    resumed = copy.deepcopy(stage)
    other = Optimizer(toy.collect_parameters([resumed]), CONFIG)
    for name, moments in other.named_state().items():
        for key, moment in moments.items():
            moment.copy_(state[name][key])
    other.load_step(1)
    for each, which in ((stage, optimizer), (resumed, other)):
        gradients(each, 1)
        which.step(RATES[1])
    for found, expected in zip(resumed.parameters(), stage.parameters(), strict=True):
        assert found.equal(expected)
    assert other.num_steps == 2


def train_and_save(sizes: dict[str, int], zero: int, folder: str | None, load: str | None) -> dict:
    """Two steps from the start (saved to `folder`), or one more after loading; weights and moments, whole."""
    grid = toy.grid_of(**sizes)
    stages = toy.build(grid, zero)
    parameters = toy.parameters_of(stages)
    optimizer = Optimizer(parameters, CONFIG)
    tensors = {f"model.{p.name}": p.parameter.detach() for p in parameters}
    for name, moments in optimizer.named_state().items():
        tensors |= {f"{key}.{name}": moment for key, moment in moments.items()}
    if load is not None:
        dcp.load(tensors, checkpoint_id=load)
        optimizer.load_step(2)
    for step in [0, 1] if load is None else [2]:
        toy.train(stages, toy.share(toy.microbatches(6, step), grid), 60, zero, 2)
        finalize_grads(parameters, grid)
        optimizer.step(RATES[step])
        optimizer.zero_grad()
    if folder is not None:
        dcp.save(tensors, checkpoint_id=folder)
    return {name: toy.full(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (({"dp_shard": 3, "tp": 2}, 3), ({}, 0)),
        (({}, 0), ({"dp_shard": 3}, 1)),
        (({"dp_replicate": 2}, 0), ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 2)),
    ],
)
def test_state_moves_between_layouts(tmp_path: Path, first: tuple, second: tuple) -> None:
    folder = str(tmp_path / "saved")
    run_ranks(train_and_save, world_size(first[0]), *first, folder, None)
    moved = run_ranks(train_and_save, world_size(second[0]), *second, None, folder)
    stayed = run_ranks(train_and_save, world_size(first[0]), *first, None, folder)
    for name, expected in stayed[0].items():
        torch.testing.assert_close(moved[0][name], expected, rtol=1e-4, atol=1e-6, msg=name)


def world_size(sizes: dict[str, int]) -> int:
    return int(torch.tensor([1, *sizes.values()]).prod())


def empty_rank() -> tuple[int, float]:
    """dp 3 where a parameter has two rows: the last rank has none. Elements of its slice, and the step counter."""
    grid = toy.grid_of(dp_shard=3)
    stages = toy.build(grid, 2)
    parameters = toy.parameters_of(stages)
    optimizer = Optimizer(parameters, CONFIG)
    toy.train(stages, toy.share(toy.microbatches(6, 0), grid), 60, 2, 2)
    optimizer.step(0.1)
    place = next(number for number, p in enumerate(parameters) if p.name == "layers.0.mix")
    moment = optimizer.named_state()["layers.0.mix"]["exp_avg"]
    assert moment.shape == (2, toy.H)
    counters = list(optimizer._rules["adam"][1]._counters.values())
    assert len(counters) == sum(p.local.numel() > 0 for p in parameters)
    return parameters[place].local.numel(), float(counters[0])


def test_a_rank_may_have_none_of_a_parameter() -> None:
    assert run_ranks(empty_rank, 3) == [(toy.H, 1.0), (toy.H, 1.0), (0, 1.0)]
