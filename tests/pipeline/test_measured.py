"""A trace is read back, its prediction uses the medians, and a wrong trace is refused with its line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.errors import DataError, ScheduleError
from megalite.pipeline.measured import compare, read_trace
from megalite.pipeline.schedules import Action, CostModel, Kind, Schedule, one_f_one_b, zb_v
from megalite.pipeline.simulate import simulate
from tools.draw_schedule import main

COST = CostModel(0.010, 0.012, 0.008, 0.002)


def meta_of(schedule: Schedule) -> dict:
    names = ("num_ranks", "num_microbatches", "num_chunks", "placement")
    return {"kind": "meta", "schedule": schedule.name, **{name: getattr(schedule, name) for name in names}}


def write_trace(path: Path, schedule: Schedule, stretch: Callable[[int, Action], float] = lambda step, action: 1.0, steps: int = 3) -> Path:
    """What the runtime would write; an action lasts `stretch` of its time and ends when it should."""
    timeline = simulate(schedule, COST)
    lines = [meta_of(schedule), {"kind": "note", "text": "passed over"}]
    for step in range(steps):
        for action, start in timeline.start.items():
            end = timeline.finish[action]
            begun = end - stretch(step, action) * (end - start)
            shown = {"action": str(action.kind), "stage": action.stage, "microbatch": action.microbatch}
            times = {"start_s": begun + step, "end_s": end + step}
            lines.append({"kind": "action", "step": step, "rank": schedule.placement[action.stage], **shown, **times})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.mark.parametrize("schedule", [one_f_one_b(3, 5), zb_v(2, 4)], ids=lambda schedule: schedule.name)
def test_a_step_that_went_as_planned(tmp_path: Path, schedule: Schedule) -> None:
    found = compare(write_trace(tmp_path / "run.jsonl", schedule))
    planned = simulate(schedule, COST)
    assert found.step == 2
    assert found.measured.schedule.orders == schedule.orders
    assert found.measured.span == pytest.approx(planned.span)
    assert found.predicted.span == pytest.approx(planned.span)
    assert found.measured_bubble == pytest.approx(planned.bubble_over_total)
    assert found.predicted.cost.latency == pytest.approx(0.002)


def test_medians_leave_the_first_step_out(tmp_path: Path) -> None:
    # the first step is ten times too short, of the others one action is
    def stretch(step: int, action: Action) -> float:
        return 0.1 if step == 0 or (step == 1 and action == Action(Kind.FORWARD, 0, 0)) else 0.5

    path = write_trace(tmp_path / "run.jsonl", one_f_one_b(2, 3), stretch)
    found = compare(path, step=1)
    assert found.predicted.cost.forward == pytest.approx((0.005, 0.005))
    assert found.predicted.cost.backward == pytest.approx((0.010, 0.010))
    short = found.measured.finish[Action(Kind.FORWARD, 0, 0)] - found.measured.start[Action(Kind.FORWARD, 0, 0)]
    assert short == pytest.approx(0.001)
    assert found.measured_bubble > simulate(one_f_one_b(2, 3), COST).bubble_over_total


def test_incomplete_steps(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "run.jsonl", one_f_one_b(2, 2))
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:-1]) + "\n")
    assert compare(path).step == 1
    with pytest.raises(DataError, match=r"does not hold all of step 2: use one of \[0, 1\]"):
        compare(path, step=2)
    without_loss = [line for line in lines if '"action": "F", "stage": 1' not in line]
    path.write_text("\n".join(without_loss) + "\n")
    with pytest.raises(ScheduleError, match="never finishes"):
        compare(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [], r"line 1: a trace begins with"),
        (lambda lines: lines[1:], r"line 1: a trace begins with"),
        (lambda lines: lines[:2], r"has no actions"),
        (lambda lines: [*lines, "{"], r"line 27: not JSON"),
        (lambda lines: [*lines, "[]"], r"line 27: not a JSON object"),
        (lambda lines: [*lines, lines[-1]], r"line 27: B1 of stage 0 is there twice in step 2"),
        (lambda lines: [*lines, '{"kind": "action", "step": 0}'], r"line 27: there is no 'rank'"),
        (lambda lines: [*lines, lines[-1].replace('"B"', '"X"')], r"line 27: 'X' is not a valid Kind"),
        (lambda lines: [*lines, lines[-1].replace('"rank": 0', '"rank": 1')], r"line 27: stage 0 does not live on rank 1"),
        (lambda lines: [*lines, lines[-1].replace('"end_s": ', '"end_s": -')], r"line 27: an action cannot run from"),
    ],
)
def test_wrong_traces(tmp_path: Path, change: Callable[[list[str]], list[str]], message: str) -> None:
    path = write_trace(tmp_path / "run.jsonl", one_f_one_b(2, 2))
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    with pytest.raises(DataError, match=message):
        read_trace(path)


def test_missing_trace(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot read trace"):
        compare(tmp_path / "none.jsonl")


def test_tool_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_trace(tmp_path / "run.jsonl", zb_v(2, 4))
    outputs = {name: tmp_path / name for name in ("a.svg", "a.html", "a.json")}
    arguments = ["--trace", str(path), "--output", str(outputs["a.svg"]), "--chrome", str(outputs["a.json"])]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["measured"]["span"] == pytest.approx(figures["span"])
    assert figures["step"] == 2
    assert "slower than predicted" in outputs["a.svg"].read_text()
    assert len(json.loads(outputs["a.json"].read_text())["traceEvents"]) == 2 * (1 + 2 + 48)
    assert main(["--trace", str(path), "--json", "--output", str(outputs["a.html"])]) == 0
    assert '"diff":true' in outputs["a.html"].read_text()
    assert main(["--trace", str(tmp_path / "none"), "--json"]) == 2
