"""The measured timeline: one clock for all ranks, one line per action."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from megalite.grid import Grid, GridShape
from megalite.pipeline import trace
from megalite.pipeline.schedules import Action, Kind, one_f_one_b
from megalite.pipeline.trace import ActionClock, TimedAction, TraceWriter, clock_offset
from tests.ranks import run_ranks


def offset_of_a_wrong_clock(shift: float) -> float:
    grid = Grid.build(GridShape(pp=3))
    real = time.perf_counter

    class Shifted:
        @staticmethod
        def perf_counter() -> float:
            return real() + shift * grid.pp.rank

    trace.time = Shifted  # type: ignore[assignment]
    try:
        return clock_offset(grid.pp, torch.device("cpu"))
    finally:
        trace.time = time


def test_clocks_that_differ_are_brought_together() -> None:
    offsets = run_ranks(offset_of_a_wrong_clock, 3, 1000.0)
    assert offsets[0] == 0.0
    assert abs(offsets[1] + 1000.0) < 0.2
    assert abs(offsets[2] + 2000.0) < 0.2


def test_actions_are_recorded_with_the_offset() -> None:
    clock = ActionClock(rank=1, device=torch.device("cpu"), offset_s=50.0)
    before = time.perf_counter()
    started = clock.start()
    clock.end(7, Action(Kind.FORWARD, 1, 2), started)
    (item,) = clock.take()
    assert (item.step, item.rank, item.action) == (7, 1, Action(Kind.FORWARD, 1, 2))
    assert before + 50.0 <= item.start_s <= item.end_s <= time.perf_counter() + 50.0
    assert clock.take() == []


def test_file_begins_at_zero_and_names_the_schedule(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "new" / "trace.jsonl", one_f_one_b(2, 4))
    writer.write([TimedAction(0, 1, Action(Kind.BACKWARD, 1, 0), 12.5, 13.0), TimedAction(0, 0, Action(Kind.FORWARD, 0, 0), 12.0, 12.25)])
    writer.write([TimedAction(1, 0, Action(Kind.FORWARD, 0, 0), 14.0, 14.5)])
    writer.close()
    meta, *actions = [json.loads(line) for line in (tmp_path / "new" / "trace.jsonl").read_text().splitlines()]
    assert meta == {
        "kind": "meta",
        "schedule": "1f1b",
        "num_ranks": 2,
        "num_microbatches": 4,
        "num_chunks": 1,
        "placement": [0, 1],
    }
    assert [(item["step"], item["rank"], item["action"], item["start_s"], item["end_s"]) for item in actions] == [
        (0, 0, "F", 0.0, 0.25),
        (0, 1, "B", 0.5, 1.0),
        (1, 0, "F", 2.0, 2.5),
    ]
