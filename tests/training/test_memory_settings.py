"""Every way to save memory trains the model of one rank: sharding 0 to 3, hybrid sharding, an odd dp, recomputation, Muon, on all axes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import RunConfig
from megalite.config_numerics import MemoryConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import Tolerance, TrainedCase, compare, tiny_config, train_case
from tests.ranks import run_ranks

FULL = MemoryConfig(recompute_granularity="full")
SELECTIVE = MemoryConfig(recompute_granularity="selective", recompute_modules=("core_attn", "norm", "mlp_act"))
NONE = MemoryConfig()


def config_of(optimizer: str, memory: MemoryConfig = NONE) -> RunConfig:
    config = tiny_config()
    config = replace(config, model=replace(config.model, num_layers=4), train=replace(config.train, global_batch_size=24, train_iters=2))
    return replace(config, optim=replace(config.optim, optimizer=optimizer), memory=memory)


def train(layout: Layout, optimizer: str, memory: MemoryConfig = NONE) -> TrainedCase:
    return run_ranks(train_case, layout.world_size, config_of(optimizer, memory), layout, timeout=180)[0]


CASES = [  # each with AdamW or Muon
    (Layout(tp=2, pp=2, sequence_parallel=True), FULL, "muon"),
    (Layout(dp=3, zero=3), SELECTIVE, "muon"),
    (Layout(dp=3, zero=1), NONE, "adam"),
    (Layout(dp=4, zero=3, replicas=2), FULL, "adam"),
    (Layout(dp=4, zero=1, replicas=2, pp=2), SELECTIVE, "muon"),
    (Layout(tp=2, pp=2, dp=2, zero=2, sequence_parallel=True), SELECTIVE, "adam"),
]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, TrainedCase]:
    return {optimizer: train(Layout(), optimizer) for optimizer in ("adam", "muon")}


@pytest.mark.parametrize(("layout", "memory", "optimizer"), CASES, ids=lambda value: getattr(value, "recompute_granularity", str(value)))
def test_trains_the_model_of_one_rank(layout: Layout, memory: MemoryConfig, optimizer: str, one_rank: dict[str, TrainedCase]) -> None:
    difference = compare(train(layout, optimizer, memory), one_rank[optimizer])
    assert difference.within(Tolerance()), difference


def test_strategies_differ_in_rounding_only() -> None:
    """With two ranks every sum over dp has two terms, so all four strategies give the same bits in fp32."""
    cases = [train(Layout(dp=2, zero=zero), "adam") for zero in range(4)]
    for zero, case in enumerate(cases):
        difference = compare(case, cases[0])
        assert max(difference.loss, difference.grad_norm) <= 1e-6, (zero, difference)
        assert difference.weights <= 1e-6, (zero, difference)
