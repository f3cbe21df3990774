"""The orders themselves, literally, and the numbers that each schedule refuses."""

from __future__ import annotations

import pytest

from megalite.errors import ScheduleError
from megalite.pipeline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    ScheduleOptions,
    build_schedule,
    dependencies,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    schedule_violations,
)
from megalite.pipeline.simulate import format_table


def order(schedule: Schedule, rank: int) -> str:
    return " ".join(schedule.label(action) for action in schedule.orders[rank])


def test_1f1b_two_ranks_four_microbatches() -> None:
    schedule = one_f_one_b(2, 4)
    assert order(schedule, 0) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert order(schedule, 1) == "F0 B0 F1 B1 F2 B2 F3 B3"


def test_1f1b_four_ranks_eight_microbatches() -> None:
    schedule = one_f_one_b(4, 8)
    assert order(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert order(schedule, 1) == "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7"
    assert order(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    schedule = one_f_one_b(4, 2)
    assert order(schedule, 0) == "F0 F1 B0 B1"
    assert order(schedule, 2) == "F0 F1 B0 B1"
    assert order(schedule, 3) == "F0 B0 F1 B1"


def test_gpipe_runs_backwards_in_ascending_order() -> None:
    schedule = gpipe(3, 2)
    assert {order(schedule, rank) for rank in range(3)} == {"F0 F1 B0 B1"}
    assert [{action.stage for action in actions} for actions in schedule.orders] == [{0}, {1}, {2}]


def test_interleaved_two_ranks_four_microbatches() -> None:
    schedule = interleaved_one_f_one_b(2, 4, 2)
    assert format_table(schedule) == (
        "r0 F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a\n"
        "r1 F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"
    )


def test_interleaved_four_ranks_eight_microbatches() -> None:
    schedule = interleaved_one_f_one_b(4, 8, 2)
    assert order(schedule, 0) == (
        "F0a F1a F2a F3a F0b F1b F2b F3b F4a F5a F6a B0b F7a B1b F4b B2b F5b B3b F6b B0a F7b B1a B2a B3a B4b B5b B6b B7b B4a B5a B6a B7a"
    )
    assert order(schedule, 3) == (
        "F0a F1a F2a F3a F0b B0b F1b B1b F2b B2b F3b B3b F4a B0a F5a B1a F6a B2a F7a B3a F4b B4b F5b B5b F6b B6b F7b B7b B4a B5a B6a B7a"
    )


def test_interleaved_group_size_with_a_shorter_last_group() -> None:
    schedule = interleaved_one_f_one_b(2, 5, 2, group_size=3)
    forwards = [action for action in schedule.orders[1] if action.kind == Kind.FORWARD]
    assert [action.microbatch for action in forwards] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [action.stage for action in forwards] == [1, 1, 1, 3, 3, 3, 1, 1, 3, 3]
    assert schedule == interleaved_one_f_one_b(2, 5, 2)  # 2 leaves a rest of 1, so 3 is the smallest that fits


def test_default_group_is_the_number_of_ranks_where_it_fits() -> None:
    assert interleaved_one_f_one_b(4, 8, 3) == interleaved_one_f_one_b(4, 8, 3, group_size=4)
    assert interleaved_one_f_one_b(4, 8, 3) != interleaved_one_f_one_b(4, 8, 3, group_size=8)


def test_group_size_is_an_option() -> None:
    options = ScheduleOptions(group_size=8)
    assert build_schedule("interleaved-1f1b", 4, 8, 3, options) == interleaved_one_f_one_b(4, 8, 3, group_size=8)
    with pytest.raises(ScheduleError, match=r"interleaved-1f1b: group size 6 does not fit 8 .*out of \[4, 8\]"):
        build_schedule("interleaved-1f1b", 4, 8, 3, ScheduleOptions(group_size=6))
    with pytest.raises(ScheduleError, match="1f1b: a group size \\(8\\) only means something to interleaved-1f1b"):
        build_schedule("1f1b", 4, 8, 1, options)


def test_looped_breadth_first() -> None:
    schedule = looped_bfs(2, 3, 2)
    assert order(schedule, 0) == "F0a F1a F2a F0b F1b F2b B0b B1b B2b B0a B1a B2a"
    assert order(schedule, 1) == order(schedule, 0)
    assert looped_bfs(3, 2, 1).orders == gpipe(3, 2).orders


def test_round_robin_placement() -> None:
    schedule = interleaved_one_f_one_b(3, 3, 2)
    assert schedule.placement == (0, 1, 2, 0, 1, 2)
    assert schedule.num_stages == 6
    assert schedule.stages_of(1) == (1, 4)


def test_forward_only_accepts_any_numbers() -> None:
    schedule = forward_only(2, 3, 2)
    assert not schedule.has_backward
    assert order(schedule, 0) == order(schedule, 1) == "F0a F1a F0b F1b F2a F2b"
    assert order(forward_only(4, 1), 3) == "F0"


def test_dependencies() -> None:
    forward, backward, half, weight = (lambda stage, kind=kind: Action(kind, stage, 5) for kind in Kind)
    assert dependencies(forward(0), 3) == []
    assert dependencies(forward(2), 3) == [forward(1)]
    assert dependencies(backward(2), 3) == [forward(2)]
    assert dependencies(backward(1), 3) == dependencies(half(1), 3) == [forward(1), backward(2)]
    assert dependencies(weight(1), 3) == [backward(1)]


@pytest.mark.parametrize(("name", "num_chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2)])
def test_registry_builds_what_it_names(name: str, num_chunks: int) -> None:
    schedule = build_schedule(name, 2, 4, num_chunks)
    assert (schedule.name, schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks) == (
        name,
        2,
        4,
        num_chunks,
    )
    assert list(SCHEDULES) == ("gpipe 1f1b interleaved-1f1b looped-bfs zb-h1 zb-h2 zb-1p zb-2p zb-v v-half v-min dualpipe-v".split())


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (("zigzag", 2, 4, 1), r"unknown pipeline schedule 'zigzag': use one of gpipe, 1f1b, interleaved-1f1b"),
        (("gpipe", 2, 4, 2), r"gpipe: this schedule has one model chunk per rank, got 2.*interleaved-1f1b"),
        (("1f1b", 2, 4, 3), r"1f1b: this schedule has one model chunk per rank, got 3"),
        (("1f1b", 2, 0, 1), r"at least 1 of micro-batches, got 0"),
        (("gpipe", 0, 1, 1), r"at least 1 of pipeline ranks, got 0"),
        (("interleaved-1f1b", 2, 4, 1), r"at least 2 model chunks per rank, got 1: use schedule 1f1b"),
        (("interleaved-1f1b", 4, 3, 2), r"got 3 for 4 ranks: use 4 or more micro-batches"),
    ],
)
def test_refused_numbers(numbers: tuple[str, int, int, int], message: str) -> None:
    assert len(schedule_violations(*numbers)) == 1
    with pytest.raises(ScheduleError, match=message):
        build_schedule(*numbers)


def test_all_violations_are_listed() -> None:
    assert len(schedule_violations("interleaved-1f1b", 4, 3, 1)) == 2
    assert len(schedule_violations("1f1b", 0, 0, 0)) == 3
    assert schedule_violations("1f1b", 4, 2, 1) == []


@pytest.mark.parametrize("group_size", [3, 5, 6, 10])
def test_refused_group_sizes_say_what_fits(group_size: int) -> None:
    # p = 4, m = 9: below p, rest 4 fits (5), rest 3 does not (6), above m
    if group_size == 5:
        assert interleaved_one_f_one_b(4, 9, 2, group_size).orders[0][5] == Action(Kind.FORWARD, 4, 0)
        return
    with pytest.raises(ScheduleError, match=rf"group size {group_size} does not fit 9 .*out of \[5, 9\]"):
        interleaved_one_f_one_b(4, 9, 2, group_size)


def test_refused_group_size_lists_usable_microbatches() -> None:
    with pytest.raises(ScheduleError, match=r"or one of \[8, 12, 16\] micro-batches"):
        interleaved_one_f_one_b(4, 10, 2, group_size=4)


def test_generators_refuse_by_themselves() -> None:
    with pytest.raises(ScheduleError, match="interleaved-1f1b"):
        interleaved_one_f_one_b(4, 2, 2)
    with pytest.raises(ScheduleError, match="micro-batches, got 0"):
        forward_only(2, 0)
