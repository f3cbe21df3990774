"""tools/bench_data.py: it measures, judges goals and differences, and does not invent a peer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench_data import main, missed


def result(**changes: Any) -> dict[str, Any]:
    return {"name": "a case", "goal": 3.0, "is_equal": True, "ratio": 3.5} | changes


def test_quick_sizes_run_without_a_peer_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--only", "start-up", "write-index"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "nothing was compared" in lines[-2]
    summary = json.loads(lines[-1])
    assert (summary["peer"], summary["missed"], len(summary["results"])) == (False, [], 3)
    for found in summary["results"]:
        assert found["ours_seconds"] > 0
        assert found["is_equal"]
        assert not {"ratio", "peer_seconds"} & found.keys()


def test_a_missed_goal_and_a_different_result_are_said() -> None:
    assert missed(result(), is_quick=False) == []
    assert missed(result(ratio=2.0), is_quick=False) == ["a case: ratio 2.00, the goal is 3"]
    assert missed(result(ratio=2.0, is_equal=False), is_quick=True) == ["a case: the results differ"]
    without_peer = result()
    del without_peer["ratio"]
    assert missed(without_peer | {"goal": 9.0}, is_quick=False) == []


def test_a_peer_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--peer", str(tmp_path), "--quick"]) == 2
    assert "install megatron-core there" in capsys.readouterr().err
