"""The verdicts of tools/parity.py on made-up results; the results of real layouts are in tests/training/test_parity.py."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from megalite.testing.layouts import Layout
from megalite.testing.parity import TrainedCase
from tools.parity import judge, largest

ONE = Layout()
CASE = TrainedCase(losses=[2.0], grad_norms=[1.0], initial={"w": "digest"}, weights={"w": np.ones(3, np.float32)})


def verdicts(*cases: tuple[Layout, TrainedCase]) -> list[str]:
    references: dict[object, TrainedCase] = {}
    return [judge(layout, case, references).failure for layout, case in cases]


def moved(by: float) -> TrainedCase:
    return replace(CASE, weights={"w": CASE.weights["w"] + np.float32(by)})


def test_equal_results_pass() -> None:
    assert verdicts((ONE, CASE), (Layout(pp=2), CASE), (Layout(tp=2), moved(1e-6))) == ["", "", ""]


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (moved(2e-4), "differs from one rank by more than the tolerance"),
        (replace(CASE, losses=[2.0001]), "differs from one rank"),
        (replace(CASE, grad_norms=[math.nan]), "differs from one rank"),
        (replace(CASE, initial={"w": "another"}), "initial weights differ: w"),
    ],
)
def test_a_layout_that_trains_another_model_fails(case: TrainedCase, problem: str) -> None:
    assert problem in verdicts((ONE, CASE), (Layout(tp=2), case))[1]


def test_one_bit_matters_over_pp_and_schedule_only() -> None:
    assert "not bitwise equal over pp and schedule: w" in verdicts((ONE, CASE), (Layout(pp=2), moved(1e-6)))[1]
    cases = (Layout(tp=2), moved(1e-6)), (Layout(tp=2, pp=2, schedule="gpipe"), moved(2e-6))
    assert "not bitwise equal" in verdicts((ONE, CASE), *cases)[2]


def test_a_tied_head_may_round_otherwise_at_pp_1_but_not_more() -> None:
    tied, cut = Layout(tied=True), Layout(tied=True, pp=2)
    assert verdicts((tied, CASE), (cut, moved(5e-7))) == ["", ""]
    assert "tied head differs over pp" in verdicts((tied, CASE), (cut, moved(5e-6)))[1]


def test_without_the_layout_of_one_rank_nothing_passes() -> None:
    assert "nothing to compare with" in verdicts((Layout(tp=2), CASE))[0]
    assert "nothing to compare with" in verdicts((ONE, CASE), (Layout(tp=2, tied=True), CASE))[1]


def test_figures_are_json() -> None:
    assert largest([1e-7, 3e-6]) == 3e-6
    assert largest([1e-7, math.inf]) is None
    assert largest([math.nan, 1e-7]) is None
