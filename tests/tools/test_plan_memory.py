"""tools/plan_memory.py: the table, the verdict, and what is refused."""

from __future__ import annotations

import json

import pytest

from tools.plan_memory import main

TINY = ["--preset", "tiny", "--tp", "2", "--pp", "2", "--world-size", "8", "--zero", "3", "--mbs", "2", "--target", "cpu"]


def test_prints_every_rank_of_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["GiB", "pp", "rank", "0", "pp", "rank", "1"]
    found = json.loads(lines[-1])
    for rank in found["ranks"]:
        peak = rank.pop("peak of a step")
        assert peak == sum(rank.values())
    assert 0 < found["bubble"] < 1


def test_a_device_that_is_too_small_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--gpu-memory-gib", "0.0001"]) == 1
    assert "the fullest rank needs" in capsys.readouterr().out


def test_wrong_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--world-size", "6"]) == 2
    assert "error: " in capsys.readouterr().err


def test_the_vocabulary_must_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--num-layers", "2"]) == 2
    assert "--vocab-size" in capsys.readouterr().err
