"""Transfers: which there are, where they stand, and that nothing else is added."""

from __future__ import annotations

import pytest

from megalite.errors import ScheduleError
from megalite.pipeline.lowering import (
    Compute,
    Program,
    Recv,
    Send,
    Transfer,
    instruction_label,
    lower,
    transfer_into,
    transfer_out_of,
)
from megalite.pipeline.schedules import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from megalite.pipeline.simulate import num_messages

F, B = Kind.FORWARD, Kind.BACKWARD


def listing(program: Program, rank: int) -> list[str]:
    return [instruction_label(program.schedule, step) for step in program.instructions[rank]]


def test_1f1b_two_ranks_two_microbatches() -> None:
    program = lower(one_f_one_b(2, 2))
    assert listing(program, 0) == [
        *("F0", "send F0 to 1", "F1", "send F1 to 1"),
        *("recv B0 from 1", "B0", "recv B1 from 1", "B1"),
    ]
    assert listing(program, 1) == [
        *("recv F0 from 0", "F0", "recv F1 from 0", "B0"),
        *("send B0 to 0", "F1", "B1", "send B1 to 0"),
    ]


def test_transfers_of_one_action() -> None:
    schedule = interleaved_one_f_one_b(2, 2, 2)  # stages 0 2 on rank 0, 1 3 on rank 1
    assert transfer_into(schedule, Action(F, 0, 1)) is None
    assert transfer_out_of(schedule, Action(F, 1, 1)) == Transfer(F, 1, 2, 1, 1, 0)
    assert transfer_into(schedule, Action(F, 2, 1)) == Transfer(F, 1, 2, 1, 1, 0)
    assert transfer_out_of(schedule, Action(F, 3, 1)) is None
    assert transfer_into(schedule, Action(B, 3, 1)) is None
    assert transfer_out_of(schedule, Action(Kind.INPUT_GRAD, 2, 0)) == Transfer(B, 2, 1, 0, 0, 1)
    assert transfer_into(schedule, Action(B, 1, 0)) == Transfer(B, 2, 1, 0, 0, 1)
    assert transfer_out_of(schedule, Action(Kind.WEIGHT_GRAD, 2, 0)) is None
    assert transfer_out_of(schedule, Action(B, 0, 0)) is None


def test_neighbours_on_one_rank_hand_over_locally() -> None:
    orders = tuple(
        tuple(Action(F, stage, 0) for stage in stages) + tuple(Action(B, stage, 0) for stage in reversed(stages))
        for stages in ((0, 3), (1, 2))
    )
    program = lower(Schedule("fold", 2, 1, 2, (0, 1, 1, 0), orders))
    assert listing(program, 1) == [
        *("recv F0a from 0", "F0a", "F0b", "send F0b to 0"),
        *("recv B0b from 0", "B0b", "B0a", "send B0a to 0"),
    ]
    assert all(isinstance(step, Compute) for step in lower(interleaved_one_f_one_b(1, 3, 2)).instructions[0])


@pytest.mark.parametrize("schedule", [gpipe(3, 5), one_f_one_b(3, 5), interleaved_one_f_one_b(3, 7, 2), forward_only(3, 5)])
def test_computes_are_the_schedule_and_transfers_are_counted(schedule: Schedule) -> None:
    program = lower(schedule)
    for rank, order in enumerate(schedule.orders):
        assert tuple(step.action for step in program.instructions[rank] if isinstance(step, Compute)) == order
    sends = [step.transfer for steps in program.instructions for step in steps if isinstance(step, Send)]
    recvs = [step.transfer for steps in program.instructions for step in steps if isinstance(step, Recv)]
    assert len(sends) == len(set(sends)) == num_messages(schedule)
    assert sorted(sends) == sorted(recvs)


def test_receives_are_listed_before_they_are_needed() -> None:
    # rank 1 can have the second activation while it is still busy with the first
    program = lower(gpipe(2, 3))
    assert listing(program, 1)[:4] == ["recv F0 from 0", "F0", "recv F1 from 0", "F1"]
    steps = lower(one_f_one_b(2, 4)).instructions[1]
    second = Transfer(F, 0, 1, 1, 0, 1)
    assert steps.index(Recv(second)) < steps.index(Compute(Action(F, 1, 1))) - 1


def test_sends_and_receives_are_never_equal() -> None:
    transfer = Transfer(F, 0, 1, 0, 0, 1)
    assert Send(transfer) != Recv(transfer)


def test_cyclic_and_doubled_orders_are_refused() -> None:
    fine = one_f_one_b(2, 2)
    cyclic = Schedule("cyclic", 2, 2, 1, (0, 1), (fine.orders[0][::-1], fine.orders[1]))
    with pytest.raises(ScheduleError, match="never finishes"):
        lower(cyclic)
    doubled = Schedule("doubled", 2, 2, 1, (0, 1), (fine.orders[0], (*fine.orders[1], fine.orders[1][-1])))
    with pytest.raises(ScheduleError, match="B1 runs twice"):
        lower(doubled)
