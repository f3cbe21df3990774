"""The dynamic loss scale moves by Megatron's rule, on the device, and can be saved."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megalite.config import NumericsConfig
from megalite.optim import LossScale

CPU = torch.device("cpu")


def fp16(**settings: Any) -> NumericsConfig:
    return NumericsConfig(precision="fp16", **settings)


def by_the_rule(overflows: list[bool], window: int, hysteresis: int, first: float, least: float) -> list[float]:
    scale, good, lives, scales = first, 0, hysteresis, []
    for overflowed in overflows:
        if overflowed:
            good, lives = 0, lives - 1
            if lives <= 0:
                scale = max(scale / 2, least)
        else:
            good += 1
            if good == window:
                scale, good, lives = scale * 2, 0, hysteresis
        scales.append(scale)
    return scales


@pytest.mark.parametrize(("window", "hysteresis"), [(3, 1), (3, 2), (5, 3), (1, 1)])
def test_the_scale_follows_the_rule(window: int, hysteresis: int) -> None:
    overflows = [random.Random(window).random() < 0.3 for _ in range(200)]
    scale = LossScale(fp16(initial_loss_scale=64.0, min_loss_scale=2.0, loss_scale_window=window, hysteresis=hysteresis), CPU)
    scales = []
    for overflowed in overflows:
        scale.update(torch.tensor(overflowed))
        scales.append(scale.scale.item())
    assert scales == by_the_rule(overflows, window, hysteresis, 64.0, 2.0)
    assert len(set(scales)) > 3


def test_a_saved_scale_goes_on() -> None:
    config = fp16(initial_loss_scale=64.0, loss_scale_window=3, hysteresis=2)
    first, second = LossScale(config, CPU), LossScale(config, CPU)
    moves = [random.Random(1).random() < 0.4 for _ in range(40)]
    for overflowed in moves[:17]:
        first.update(torch.tensor(overflowed))
    second.load(first.state())
    for overflowed in moves[17:]:
        first.update(torch.tensor(overflowed))
        second.update(torch.tensor(overflowed))
        assert first.scale == second.scale


def test_fixed_scales_and_other_formats_do_not_move() -> None:
    for config, expected in [(fp16(loss_scale=128.0), 128.0), (NumericsConfig(), 1.0), (NumericsConfig(precision="bf16"), 1.0)]:
        scale = LossScale(config, CPU)
        scale.update(torch.tensor(True))
        assert (scale.scale.item(), scale.state(), scale.is_at_minimum.item()) == (expected, {}, True)
