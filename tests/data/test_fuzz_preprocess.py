"""Hostile corpora and sudden deaths, a few of each; the programs in tests/ run thousands."""

from __future__ import annotations

import pytest

from tests.fuzz_preprocess import judge, run_cases
from tests.kill_preprocess import run


def test_hostile_corpora() -> None:
    """Requirements 1 to 8: the right dataset or one clear error (`tests/fuzz_preprocess.py --cases 10000` runs more)."""
    counts = run_cases(300, seed=1_000_000)
    assert counts["dataset"] > 50
    assert counts["error"] > 50


def test_the_judge_knows_right_from_wrong() -> None:
    corpus = (
        b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n{"text": ["", "c"]}\n{"text": 1}\n{"text": "\\ud800"}\n{"x": 1e999}\n{"a": "b"} {}'
    )
    expected = judge(corpus, ("text",))
    assert expected.documents == [[["a\u2028b"]], [["c"]]]
    assert expected.bad_lines == [4, 5, 6, 7]


@pytest.mark.timeout(120)
def test_killed_runs_leave_complete_datasets_or_none() -> None:
    """Requirement 10, for the run itself (`tests/kill_preprocess.py --kills 50` kills more often)."""
    figures = run(num_kills=3, seed=5, num_lines=800)
    assert figures["problems"] == []
    assert figures["running"]
