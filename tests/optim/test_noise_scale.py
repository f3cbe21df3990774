"""The gradient noise scale: right on data whose noise is known, and the same in every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config import RunConfig
from megalite.optim import NoiseScale
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, problems, tiny_config
from megalite.training.loop import train_step
from tests.ranks import run_ranks


@pytest.mark.parametrize("sizes", [(4, 4), (3, 5)])
def test_finds_the_noise_of_gradients_with_a_known_covariance(sizes: tuple[int, int]) -> None:
    """Samples' gradients are G + noise: tr(S) / |G|^2 = sum of variances / |G|^2."""
    generator = torch.Generator().manual_seed(5)
    true, deviations = torch.full((64,), 0.5), torch.linspace(0.5, 2.0, 64)
    estimate, total = NoiseScale(torch.device("cpu"), decay=0.999), sum(sizes)
    assert torch.isnan(estimate.value)
    for _ in range(1500):
        noise = torch.randn(total, 64, generator=generator) * deviations
        first, second = ((true + noise).split(sizes)[place].sum(0) / total for place in (0, 1))
        estimate.add((first.norm(), second.norm(), (first + second).norm()), torch.tensor(sizes) * 10.0, total)
    expected = float(deviations.square().sum() / true.square().sum())
    assert float(estimate.value) == pytest.approx(expected, rel=0.05)


def test_steps_that_say_nothing_are_left_out() -> None:
    estimate = NoiseScale(torch.device("cpu"))
    good = (torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.5))
    estimate.add(good, torch.tensor([5.0, 5.0]), 8)
    value = float(estimate.value)
    for norms, tokens in (((torch.tensor(torch.nan), *good[1:]), [5.0, 5.0]), (good, [0.0, 10.0]), (good, [0.0, 0.0])):
        estimate.add(norms, torch.tensor(tokens), 8)
        assert float(estimate.value) == value


def noise_config(enabled: bool = True) -> RunConfig:
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=2),
        train=replace(config.train, global_batch_size=8, micro_batch_size=1),
        numerics=replace(config.numerics, log_gradient_noise_scale=enabled),
    )


def estimates(layout: Layout, enabled: bool = True) -> list[float]:
    """Of three steps: the estimate (0 where it is switched off), then the gradient norm."""
    run = build_in_this_world(layout.apply(noise_config(enabled)).resolve())
    records = [train_step(run) for _ in range(3)]
    run.train_loader.close()
    return [float(record.noise_scale or 0.0) for record in records] + [float(record.grad_norm) for record in records]


def test_every_layout_gives_the_estimate_of_one_rank_and_nothing_else_changes() -> None:
    reference, without = run_ranks(estimates, 1, Layout())[0], run_ranks(estimates, 1, Layout(), False)[0]
    assert without[3:] == pytest.approx(reference[3:], rel=1e-5)
    assert all(value > 0 for value in reference[:3])
    for layout in (
        Layout(pp=2, schedule="zb-h1"),
        Layout(tp=2, pp=2, sequence_parallel=True, tied=False),
        Layout(dp=2, zero=0),
        Layout(dp=2, zero=3),
    ):
        for found in run_ranks(estimates, layout.world_size, layout):
            assert found == pytest.approx(reference, rel=2e-4), str(layout)


def test_a_step_that_has_no_halves_is_refused() -> None:
    config = replace(noise_config(), train=replace(noise_config().train, global_batch_size=6))
    assert problems(config, Layout()) == []
    (violation,) = problems(config, Layout(dp=2))
    assert "3 micro-batches" in violation
    interleaved = Layout(pp=4, schedule="interleaved-1f1b")  # which needs a multiple of 4 micro-batches in a pass
    four = replace(config, model=replace(config.model, num_layers=8), train=replace(config.train, global_batch_size=4))
    assert problems(replace(four, numerics=noise_config(False).numerics), interleaved) == []
    assert problems(four, interleaved) != []
