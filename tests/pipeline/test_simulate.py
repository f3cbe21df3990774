"""Makespans, bubbles, peaks and message counts against published or hand-derived numbers (F = I = W = 1, B = 2)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.errors import ConfigError, ScheduleError
from megalite.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
)
from megalite.pipeline.simulate import CostModel, format_table, simulate

ROOT = Path(__file__).parents[2]
SIZES = [(2, 4), (4, 8), (4, 16), (8, 32)]


def odd(first: int, last: int) -> tuple[int, ...]:
    return tuple(range(first, last - 1, -2))


def down(first: int) -> tuple[int, ...]:
    return tuple(range(first, 0, -1))


def by_size(*values: object) -> list[tuple[tuple[int, int], object]]:
    return list(zip(SIZES, values, strict=True))


@pytest.mark.parametrize(("size", "expected"), by_size(15, 33, 57, 117))
def test_gpipe(size: tuple[int, int], expected: float) -> None:
    timeline = simulate(gpipe(*size))
    assert timeline.makespan == timeline.span == expected
    assert timeline.peaks == timeline.peaks_at_input_grad == (size[1],) * size[0]


@pytest.mark.parametrize(("size", "expected"), by_size((15, down(2)), (33, down(4)), (57, down(4)), (117, down(8))))
def test_1f1b(size: tuple[int, int], expected: tuple[float, tuple[int, ...]]) -> None:
    timeline = simulate(one_f_one_b(*size))
    assert timeline.makespan == timeline.span == expected[0]
    assert timeline.peaks == expected[1]


@pytest.mark.parametrize(("size", "expected"), by_size((27, odd(5, 3)), (57, odd(11, 5)), (105, odd(11, 5)), (213, odd(23, 9))))
def test_interleaved_two_chunks(size: tuple[int, int], expected: tuple[float, tuple[int, ...]]) -> None:
    timeline = simulate(interleaved_one_f_one_b(*size, 2))
    assert timeline.makespan == expected[0]
    assert timeline.peaks == expected[1]


@pytest.mark.parametrize(("size", "expected"), by_size((51, odd(9, 7)), (105, odd(19, 13)), (201, odd(19, 13)), (405, odd(39, 25))))
def test_interleaved_four_chunks(size: tuple[int, int], expected: tuple[float, tuple[int, ...]]) -> None:
    timeline = simulate(interleaved_one_f_one_b(*size, 4))
    assert timeline.makespan == expected[0]
    assert timeline.peaks == expected[1]


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "makespan", "peaks"),
    [(4, 2, 15, (2, 2, 2, 1)), (4, 1, 12, (1, 1, 1, 1)), (8, 4, 33, (4, 4, 4, 4, 4, 3, 2, 1))],
)
def test_1f1b_with_few_microbatches(num_ranks: int, num_microbatches: int, makespan: float, peaks: tuple[int, ...]) -> None:
    timeline = simulate(one_f_one_b(num_ranks, num_microbatches))
    assert timeline.makespan == makespan
    assert timeline.peaks == peaks
    assert simulate(gpipe(num_ranks, num_microbatches)).makespan == makespan


def test_formulas() -> None:
    for p in range(1, 7):
        for m in range(1, 14):
            for schedule in (gpipe(p, m), one_f_one_b(p, m)):
                timeline = simulate(schedule)
                assert timeline.makespan == 3 * (m + p - 1)
                assert timeline.bubble_over_ideal == pytest.approx((p - 1) / m)
                assert timeline.bubble_over_total == pytest.approx((p - 1) / (m + p - 1))
            assert simulate(one_f_one_b(p, m)).peaks == tuple(min(p - r, m) for r in range(p))
            assert simulate(forward_only(p, m)).makespan == m + p - 1


def test_interleaved_formulas_for_every_group_size() -> None:
    for p in range(1, 6):
        for m in range(p, 13):
            for v in (2, 3):
                for n in range(p, m + 1):
                    if m % n and m % n < p:
                        continue
                    timeline = simulate(interleaved_one_f_one_b(p, m, v, n))
                    assert timeline.makespan == 3 * (m * v + p - 1)
                    assert timeline.bubble_over_ideal == pytest.approx((p - 1) / (m * v))
                    assert timeline.peaks == tuple(min(m * v, 2 * (p - r - 1) + (v - 1) * n + 1) for r in range(p))


@pytest.mark.parametrize(("size", "expected"), by_size(15.2, 33.6, 57.6, 118.4))
def test_gpipe_with_latency(size: tuple[int, int], expected: float) -> None:
    assert simulate(gpipe(*size), CostModel(latency=0.1)).makespan == pytest.approx(expected)


@pytest.mark.parametrize(("size", "expected"), by_size(15.4, 34.6, 59.8, 123.8))
def test_1f1b_with_latency(size: tuple[int, int], expected: float) -> None:
    assert simulate(one_f_one_b(*size), CostModel(latency=0.1)).makespan == pytest.approx(expected)


@pytest.mark.parametrize(("size", "expected"), by_size(27.6, 58.4, 106.4, 216.0))
def test_interleaved_with_latency(size: tuple[int, int], expected: float) -> None:
    assert simulate(interleaved_one_f_one_b(*size, 2), CostModel(latency=0.1)).makespan == pytest.approx(expected)


def test_messages() -> None:
    assert [simulate(one_f_one_b(*size)).messages for size in ((2, 4), (4, 8), (8, 32))] == [8, 48, 448]
    vpp = [simulate(interleaved_one_f_one_b(*size, 2)).messages for size in ((2, 4), (4, 8), (8, 32))]
    assert vpp == [24, 112, 960]
    assert simulate(forward_only(2, 4, 2)).messages == 12
    assert simulate(interleaved_one_f_one_b(1, 4, 2)).messages == 0


def split_backward() -> Schedule:
    """Two ranks, two micro-batches, backward in halves: rank 1 keeps both W for the end."""

    def actions(stage: int, text: str) -> tuple[Action, ...]:
        return tuple(Action(Kind(word[0]), stage, int(word[1])) for word in text.split())

    orders = (actions(0, "F0 F1 I0 W0 I1 W1"), actions(1, "F0 I0 F1 I1 W0 W1"))
    return Schedule("split", 2, 2, 1, (0, 1), orders)


def test_split_backward() -> None:
    timeline = simulate(split_backward())
    # r0: F0 0-1, F1 1-2, idle, I0 3-4, W0 4-5, I1 5-6, W1 6-7; r1: F0 1-2, I0 2-3, F1 3-4, I1 4-5, W 5-7
    assert timeline.makespan == 7
    assert timeline.finish[Action(Kind.INPUT_GRAD, 0, 1)] == 6
    assert timeline.peaks == (2, 2)
    assert timeline.peaks_at_input_grad == (2, 1)


def test_makespan_and_span_differ_when_late_ranks_start_late() -> None:
    timeline = simulate(forward_only(3, 4))
    assert (timeline.makespan, timeline.span, timeline.bubble_over_ideal) == (6, 4, 0)


def test_costs_per_stage() -> None:
    # the head makes stage 1 slow: rank 1 runs 4 x (2 + 3) without a gap, after F0 of stage 0 and before its last B
    timeline = simulate(one_f_one_b(2, 4), CostModel(forward=(1, 2), input_grad=(1, 2)))
    assert timeline.makespan == 1 + 4 * (2 + 3) + 2
    assert timeline.ideal == 20
    with pytest.raises(ConfigError, match="forward has 3 numbers for 2 stages"):
        simulate(one_f_one_b(2, 4), CostModel(forward=(1, 2, 3)))


def test_wrong_costs_are_refused() -> None:
    with pytest.raises(ConfigError, match="latency is -1"):
        CostModel(latency=-1)
    with pytest.raises(ConfigError, match=r"forward is \(1, nan\)"):
        CostModel(forward=(1, float("nan")))
    with pytest.raises(ConfigError, match="bandwidth is 0"):
        CostModel(bandwidth=0)


def test_messages_take_turns_on_their_connection() -> None:
    # two forwards of one unit, messages of 3 bytes at 1 byte per unit and 0.5 latency: they leave at 1 and at 4
    cost = CostModel(message_bytes=3, latency=0.5, bandwidth=1)
    timeline = simulate(forward_only(2, 2), cost)
    assert [timeline.start[Action(Kind.FORWARD, 1, mb)] for mb in range(2)] == [4.5, 7.5]
    # a connection of the other direction is another one
    assert simulate(one_f_one_b(2, 1), cost).makespan == 1 + 3.5 + 1 + 2 + 3.5 + 2


def test_communication_that_is_not_overlapped_keeps_the_sender_busy() -> None:
    cost = CostModel(latency=0.5, overlap_communication=False)
    timeline = simulate(forward_only(2, 3), cost)
    assert [timeline.start[Action(Kind.FORWARD, 0, mb)] for mb in range(3)] == [0, 1.5, 3]
    assert timeline.makespan == 5.5


def test_looped_breadth_first() -> None:
    assert [simulate(looped_bfs(*size, 2)).makespan for size in SIZES] == [27, 57, 105, 213]
    assert simulate(looped_bfs(4, 8, 2)).peaks == (16,) * 4
    assert simulate(looped_bfs(4, 8, 2)).messages == 2 * 8 * 7


@pytest.mark.parametrize("c", [0.1, 0.25])
def test_latency_formulas(c: float) -> None:
    """With p dividing m, 1F1B waits 2c[(p-1)(1+m/p) - 1], GPipe 2(p-1)c and interleaved 1F1B 2(pv-1)c."""
    for p, m in ((2, 4), (3, 6), (4, 8), (4, 16), (5, 15)):
        assert simulate(one_f_one_b(p, m), CostModel(latency=c)).makespan == pytest.approx(
            3 * (m + p - 1) + 2 * c * ((p - 1) * (1 + m / p) - 1)
        )
        assert simulate(gpipe(p, m), CostModel(latency=c)).makespan == pytest.approx(3 * (m + p - 1) + 2 * c * (p - 1))
        for v in (2, 3):
            timeline = simulate(interleaved_one_f_one_b(p, m, v), CostModel(latency=c))
            assert timeline.makespan == pytest.approx(3 * (m * v + p - 1) + 2 * c * (p * v - 1))


def test_orders_that_wait_for_each_other() -> None:
    schedule = one_f_one_b(2, 2)
    swapped = Schedule("swapped", 2, 2, 1, (0, 1), (schedule.orders[0][::-1], schedule.orders[1]))
    with pytest.raises(ScheduleError, match=r"rank 0 stops at action 0, B1 of stage 0, which waits for F1 of stage 0"):
        simulate(swapped)


def test_timeline_table() -> None:
    lines = format_table(simulate(one_f_one_b(2, 2), CostModel(latency=0.5))).splitlines()
    assert [line.split() for line in lines] == [
        ["time", "rank", "0", "rank", "1"],
        ["0", "F0", "."],
        ["1", "F1", "."],
        ["1.5", "|", "F0"],
        ["2", ".", "|"],
        ["2.5", ".", "B0"],
        ["4.5", ".", "F1"],
        ["5", "B0", "|"],
        ["5.5", "|", "B1"],
        ["7", ".", "|"],
        ["7.5", ".", "."],
        ["8", "B1", "."],
    ]


def draw(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "draw_schedule.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_draw_schedule_tool() -> None:
    numbers = ("--schedule", "interleaved-1f1b", "--pp", "2", "--num-microbatches", "4", "--vpp", "2")
    result = draw(*numbers, "--cost", "1,1,1,0.1")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("r0 F0a F1a F0b")
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "schedule": "interleaved-1f1b",
        "bubble": pytest.approx(3.6 / 27.6),
        "makespan": 27.6,
        "span": 27.6,
        "bubble_over_ideal": 0.15,
        "bubble_over_total": pytest.approx(3.6 / 27.6),
        "peaks": [5, 3],
        "peaks_at_input_grad": [5, 3],
        "messages": 24,
    }


def test_draw_schedule_tool_reports_errors() -> None:
    result = draw("--schedule", "interleaved-1f1b", "--pp", "4", "--num-microbatches", "3", "--vpp", "2")
    assert result.returncode == 2
    assert "got 3 for 4 ranks" in result.stderr
    assert "Traceback" not in result.stderr
