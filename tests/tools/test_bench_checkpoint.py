"""tools/bench_checkpoint.py runs every contender on a small model; its figures say nothing here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tools import bench_checkpoint
from tools.bench_checkpoint import ASYNC, BLOCKED, DCP, SYNC, TORCH, measure


def found(blocked: float) -> dict:
    """What `measure` would give."""
    save = {SYNC: [4.0, 2.0, 3.0], BLOCKED: [blocked] * 3, ASYNC: [4.0] * 3, DCP: [1.5] * 3, TORCH: [1.0] * 3}
    load = {SYNC: [2.0], DCP: [2.0], TORCH: [1.0]}
    return {"save": save, "load": load, "parts": {"content hashes": [0.3]}, "first_blocked": 1.0, "bytes": 3 * 10**9}


def test_every_contender_runs_and_cleans_up_after_itself(tmp_path: Path) -> None:
    (result,) = run_ranks(measure, 1, tmp_path, True, 1)
    assert result["save"].keys() == {SYNC, BLOCKED, ASYNC, DCP, TORCH}
    assert result["load"].keys() == {SYNC, DCP, TORCH}
    assert all(seconds > 0 for kind in ("save", "load", "parts") for (seconds,) in result[kind].values())
    assert result["save"][ASYNC][0] > result["save"][BLOCKED][0]
    assert not list(tmp_path.glob("megalite/step-*"))


@pytest.mark.parametrize(("blocked", "code"), [(0.74, 0), (0.76, 1)])
def test_a_quarter_of_the_median_synchronous_save_is_the_limit(
    blocked: float, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_checkpoint.RankPool, "run", lambda *_, **__: [found(blocked)])
    monkeypatch.setattr("sys.argv", ["bench_checkpoint.py"])
    assert bench_checkpoint.main() == code
    assert f"blocks for {blocked / 3:.1%} of a synchronous one" in capsys.readouterr().out
