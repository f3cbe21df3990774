"""tools/plan_comm.py: the table, its JSON, and what is refused."""

from __future__ import annotations

import json

import pytest

from tools.plan_comm import main

TINY = ["--preset", "tiny", "--num-layers", "3", "--tp", "2", "--pp", "3", "--world-size", "12", "--zero", "1", "--target", "cpu"]


def test_prints_every_rank_of_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    ranks = json.loads(lines[-1])["ranks"]
    sends = [sum(row["calls"] for row in rows if row["op"] == "send") for rows in ranks]
    assert sends == [4, 8, 4]  # 4 micro-batches; the rank in the middle has two neighbours
    assert {row["axis"] for row in ranks[0]} == {"pp", "tp", "dp", "dp_shard"}
    assert len([line for line in lines if "all axes" in line]) == 3
    assert all(row["sent"] == 0 for rows in ranks for row in rows if row["op"] == "recv")


def test_wrong_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--world-size", "7"]) == 2
    assert "error: " in capsys.readouterr().err
