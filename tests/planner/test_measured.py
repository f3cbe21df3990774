"""Predictions against runs: every living tensor of a step is counted, on several layouts, schedules and precisions."""

from __future__ import annotations

import pytest

from megalite.config_numerics import MemoryConfig
from megalite.testing.layouts import Layout
from megalite.testing.memory_cases import MemoryCase, gradient_bytes, measure
from tests.ranks import run_ranks

SELECTIVE = MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp_act", "norm"))
CASES = [
    MemoryCase(),
    MemoryCase(precision="bf16", memory=SELECTIVE),
    MemoryCase(layout=Layout(tp=2, pp=2, sequence_parallel=True)),
    MemoryCase(layout=Layout(pp=2, schedule="gpipe"), memory=MemoryConfig(recompute_granularity="full")),
    MemoryCase(layout=Layout(pp=2, schedule="zb-h1")),
    MemoryCase(layout=Layout(pp=2, schedule="dualpipe-v")),
    MemoryCase(layout=Layout(pp=4, schedule="interleaved-1f1b")),
    MemoryCase(layout=Layout(dp=2, zero=0)),
    MemoryCase(layout=Layout(dp=3, zero=1), precision="bf16"),
    MemoryCase(layout=Layout(pp=2, dp=2, zero=3), precision="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prediction_is_within_a_tenth(case: MemoryCase) -> None:
    """States within 5 %, what a step adds to weights and optimizer within 10 %, on every rank."""
    for place, rows in run_ranks(measure, case.layout.world_size, case, timeout=120):
        states = rows["weights (fp32)"], rows["optimizer state"]
        for predicted, found in states:
            assert found is not None
            assert found == pytest.approx(predicted, rel=0.05), (place, rows)
        predicted, peak = rows["peak of a step"]
        assert peak is not None
        held = sum(value or 0 for _, value in states)
        assert peak - held == pytest.approx(predicted - sum(value for value, _ in states), rel=0.1), (place, rows)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_zero_3_holds_16_bytes_per_parameter_over_all_ranks(ranks: int) -> None:
    layout = Layout(dp=ranks, zero=3 if ranks > 1 else 0)
    for held, parameters in run_ranks(gradient_bytes, ranks, MemoryCase(layout=layout), timeout=120):
        assert held == pytest.approx(16 * parameters / ranks, rel=0.05)
