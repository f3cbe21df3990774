"""The verdicts of tools/bench_numerics.py on made-up curves; its runs are too long for a test."""

from __future__ import annotations

import pytest

from tools.bench_numerics import CASES, judge, tenths


def curves(**changed: list[float]) -> dict[str, list[float]]:
    plain = {name: [3.0, 2.0] for name in CASES}
    plain["fp32, another seed"] = [3.05, 2.01]
    return plain | changed


def test_curves_that_stay_together_hold() -> None:
    assert judge(curves())["holds"] is True


@pytest.mark.parametrize(
    "changed",
    [
        {"bf16, tp 2 x pp 2 x dp 2, zero 3": [3.06, 2.0]},
        {"bf16": [3.0, 2.05], "bf16, tp 2 x pp 2 x dp 2, zero 3": [3.0, 2.05]},
        {"fp16, forced to overflow": [4.0, 2.05]},
    ],
)
def test_curves_that_part_do_not(changed: dict[str, list[float]]) -> None:
    assert judge(curves(**changed))["holds"] is False


def test_a_tenth_is_a_mean() -> None:
    assert tenths([float(i) for i in range(20)])[:2] == [0.5, 2.5]
