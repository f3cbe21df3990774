"""Schedules on the V placement: ZB-V, DualPipeV, V-Half, V-Min, and the order of an evaluation there."""

from __future__ import annotations

from itertools import pairwise

import pytest

from megalite.errors import ScheduleError
from megalite.pipeline.schedules import (
    CostModel,
    Kind,
    Schedule,
    build_schedule,
    dualpipe_v,
    forward_only,
    v_half,
    v_min,
    v_placement,
    zb_v,
)
from megalite.pipeline.simulate import simulate
from megalite.pipeline.verify import verify

SIZES = [(2, 4), (4, 8), (4, 16), (8, 32)]


def order(schedule: Schedule, rank: int) -> str:
    """Overlapped pairs in brackets, as in the published tables."""
    words: list[str] = []
    actions = schedule.orders[rank]
    for number, action in enumerate(actions):
        if number and actions[number - 1] in schedule.overlapped:
            words[-1] = f"({words[-1]}&{schedule.label(action)})"
        else:
            words.append(schedule.label(action))
    return " ".join(words)


def test_placement() -> None:
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert [zb_v(3, 5).stages_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_literal_orders_of_two_ranks() -> None:
    assert order(zb_v(2, 4), 0) == "F0a F1a F2a F0b I0b W0b F1b I1b W1b F3a I0a W0a F2b I2b W2b I1a W1a F3b I3b W3b I2a W2a I3a W3a"
    assert order(zb_v(2, 4), 1) == "F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b F3a I1a W1a F3b I2b W2b I2a I3b I3a W2a W3b W3a"
    assert order(dualpipe_v(2, 4), 0) == "F0a F1a F2a F0b I0b W0b F1b (F3a&B1b) (F2b&B0a) B2b (F3b&B1a) B3b I2a W2a I3a W3a"
    assert order(dualpipe_v(2, 4), 1) == "F0a F0b F1a F1b F2a B0b (F2b&B0a) (F3a&B1b) (F3b&B1a) B2b B2a I3b I3a W3b W3a"


def test_literal_orders_of_four_ranks() -> None:
    assert order(zb_v(4, 8), 3) == (
        "F0a F0b F1a F1b F2a F2b F3a F3b I0b W0b F4a I0a W0a F4b I1b W1b F5a I1a W1a F5b I2b W2b F6a I2a W2a F6b I3b W3b "
        "F7a I3a W3a F7b I4b W4b I4a I5b I5a I6b I6a I7b I7a W4a W5b W6b W7b W5a W6a W7a"
    )
    assert order(dualpipe_v(4, 8), 0) == (
        "F0a F1a F2a F3a F4a F5a F6a F0b I0b W0b F1b I1b W1b F2b I2b W2b F3b (F7a&B3b) (F4b&B0a) B4b (F5b&B1a) B5b "
        "(F6b&B2a) B6b (F7b&B3a) B7b I4a W4a I5a W5a I6a W6a I7a W7a"
    )


@pytest.mark.parametrize(("size", "expected"), list(zip(SIZES, ((25, 24), (51, 48), (99, 96), (199, 192)), strict=True)))
def test_zb_v(size: tuple[int, int], expected: tuple[float, float]) -> None:
    p, m = size
    timeline = simulate(zb_v(p, m))
    assert (timeline.makespan, timeline.span) == expected
    assert timeline.peaks == (2 * p,) * p
    assert timeline.bubble_over_total == 0
    assert timeline.messages == 4 * m * (p - 1)


def test_zb_v_with_few_microbatches_latency_and_unequal_times() -> None:
    assert [simulate(zb_v(*size)).span for size in ((4, 4), (4, 6), (8, 8), (8, 12))] == [30, 38, 62, 78]
    spans = [simulate(zb_v(*size), CostModel(latency=0.1)).span for size in SIZES]
    assert spans == pytest.approx([24.4, 49.6, 97.6, 196.0])
    assert simulate(zb_v(4, 8), CostModel(weight_grad=0.5)).span == 43


@pytest.mark.parametrize(("size", "block", "apart"), list(zip(SIZES, (26, 54, 102, 206), (25, 51, 99, 199), strict=True)))
def test_dualpipe_v(size: tuple[int, int], block: float, apart: float) -> None:
    """The published makespans take a block as one action that waits for both inputs; run one by one, F starts earlier."""
    p, m = size
    assert simulate(dualpipe_v(p, m), CostModel(overlapped_pair=3)).makespan == block
    assert simulate(dualpipe_v(p, m)).makespan == apart
    assert simulate(dualpipe_v(p, m)).peaks == (2 * p + 1,) * p


def test_dualpipe_v_with_overlap_and_latency() -> None:
    overlapped = [simulate(dualpipe_v(*size), CostModel(overlapped_pair=2.5)).makespan for size in ((4, 8), (4, 16), (8, 32))]
    assert overlapped == [49, 89, 179]
    slow = CostModel(overlapped_pair=3, latency=0.1)
    assert [simulate(dualpipe_v(*size), slow).makespan for size in SIZES] == pytest.approx([26.4, 55.6, 104.8, 213.2])


def test_overlapped_pairs_are_neighbours() -> None:
    schedule = dualpipe_v(3, 7)
    assert all(action.kind is Kind.FORWARD for action in schedule.overlapped)
    followers = [following.kind for actions in schedule.orders for action, following in pairwise(actions) if action in schedule.overlapped]
    assert set(followers) == {Kind.BACKWARD}
    assert len(followers) == len(schedule.overlapped)


def test_dualpipe_v_refuses_few_microbatches() -> None:
    with pytest.raises(
        ScheduleError, match=r"dualpipe-v: .*got 7 for 4 ranks: use 8 or more micro-batches, at most 3 ranks, or schedule zb-v"
    ):
        dualpipe_v(4, 7)


@pytest.mark.parametrize(
    ("size", "half", "least"),
    [
        ((2, 4), (25, 4), (27, 4)),
        ((4, 8), (53, 6), (59, 4)),
        ((4, 16), (101, 6), (107, 4)),
        ((8, 32), (209, 10), (219, 8)),
        ((6, 12), (83, 8), (89, 6)),
        ((8, 16), (113, 10), (123, 8)),
    ],
)
def test_v_half_and_v_min(size: tuple[int, int], half: tuple[float, int], least: tuple[float, int]) -> None:
    for make, expected in ((v_half, half), (v_min, least)):
        timeline = simulate(make(*size))
        assert (timeline.span, max(timeline.peaks)) == expected
        assert timeline.messages == 4 * size[1] * (size[0] - 1)


@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_two_chunks_are_needed(name: str) -> None:
    with pytest.raises(ScheduleError, match=rf"{name}: this schedule places two model chunks per rank in a V, got 1.*--vpp 2"):
        build_schedule(name, 2, 4, 1)


def test_evaluation_on_the_v() -> None:
    schedule = forward_only(2, 3, 2, v_placement(2))
    assert order(schedule, 0) == "F0a F1a F2a F0b F1b F2b"
    assert order(schedule, 1) == "F0a F0b F1a F1b F2a F2b"
    assert schedule.placement == v_placement(2)
    assert simulate(forward_only(4, 8, 2, v_placement(4))).span == 2 * 8 + 2 * 3  # 2m of work, 2(p-1) of waiting
    verify(forward_only(4, 5, 2, (3, 1, 0, 2, 2, 3, 0, 1)))
