"""The proof accepts every schedule we generate and refuses each class of wrong ones, saying where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.errors import ScheduleError
from megalite.pipeline.lowering import Compute, Instruction, Program, Recv, Send, Transfer, lower
from megalite.pipeline.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
)
from megalite.pipeline.schedules.constraints import group_size_violations
from megalite.pipeline.simulate import simulate
from megalite.pipeline.verify import verify
from tools.verify_schedules import PEAK_LIMITS, Count, numbers, sweep

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD  # noqa: E741


def test_every_small_schedule_is_right() -> None:
    """Up to 5 ranks, 10 micro-batches and 3 chunks; `tools/verify_schedules.py` goes on to 8, 16 and 4."""
    count = Count()
    assert sweep(list(SCHEDULES), numbers(5, 10, 3), count) == []
    evaluations = 5 * 10 * 3 + 4 * 10  # round robin for each v, and the V where it is another placement
    one_chunk = 6 * 50  # gpipe, 1f1b and four zero-bubble schedules
    groups = sum(not group_size_violations(p, m, n) for p in range(1, 6) for m in range(1, 11) for n in range(1, m + 1))
    two_chunks = 3 * 50 + sum(m >= 2 * p for p in range(1, 6) for m in range(1, 11))
    assert count.schedules == evaluations + one_chunk + 3 * 50 + 2 * groups + two_chunks


def test_sweep_reports_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEAK_LIMITS, "1f1b", lambda p, m, v: 1)
    failures = sweep(["1f1b"], numbers(2, 2, 1), Count())
    assert [line.split(":")[0] for line in failures] == ["1f1b p=2 m=2 v=1"]
    assert "rank 0: 0 F0 | [1 F1] | 2 B0 | 3 B1 | 4 end" in failures[0]


def test_memory_limit() -> None:
    assert verify(one_f_one_b(4, 8), 4).peaks[0] == 4
    with pytest.raises(ScheduleError, match=r"rank 0, action 3 \(F3\): this is activation number 4 at once, at most 3 are allowed"):
        verify(one_f_one_b(4, 8), 3)


@pytest.mark.parametrize(
    ("placement", "message"),
    [((0, 0), "rank 0 has 2, every rank must have 1"), ((0, 1, 2), "only ranks 0 to 1"), ((0,), "rank 1 has 0")],
)
def test_wrong_placement(placement: tuple[int, ...], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(replace(gpipe(2, 1), placement=placement))


def test_every_group_size_is_right() -> None:
    for m in range(3, 12):
        for n in range(3, m + 1):
            if m % n == 0 or m % n >= 3:
                verify(interleaved_one_f_one_b(3, m, 2, n))


def test_proof_counts_memory() -> None:
    proof = verify(one_f_one_b(4, 8))
    assert proof.peaks == proof.peaks_at_input_grad == (4, 3, 2, 1)
    assert proof.num_transfers == 48
    # in GPipe each tensor is consumed before the next one can exist
    assert verify(gpipe(2, 3)).peak_received == (1, 1)
    # 1F1B: rank 1 waits for B0 until time 5, and the activation of F2 lies there since time 3
    assert verify(one_f_one_b(3, 4)).peak_received == (1, 2, 1)
    assert verify(gpipe(1, 3)).peak_received == (0,)
    assert verify(forward_only(3, 4)).peaks == (1, 1, 1)


# ---- wrong schedules -------------------------------------------------------------------------------------------------


def split_backward(late: str = "F0 I0 F1 I1 W0 W1") -> Schedule:
    def actions(stage: int, text: str) -> tuple[Action, ...]:
        return tuple(Action(Kind(word[0]), stage, int(word[1])) for word in text.split())

    return Schedule("split", 2, 2, 1, (0, 1), (actions(0, "F0 F1 I0 W0 I1 W1"), actions(1, late)))


def with_order(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return replace(schedule, orders=tuple(orders))


def test_split_backward_is_right() -> None:
    proof = verify(split_backward())
    assert proof.peaks == (2, 2)
    assert proof.peaks_at_input_grad == (2, 1)
    assert verify(split_backward("F0 B0 F1 I1 W1")).peaks == (2, 1)  # one whole, one in halves


@pytest.mark.parametrize(("position", "message"), [(1, r"rank 0 lacks F1 of stage 0"), (4, r"rank 0 lacks B1 of stage 0")])
def test_missing_action(position: int, message: str) -> None:
    schedule = one_f_one_b(2, 4)
    order = list(schedule.orders[0])
    del order[position]
    with pytest.raises(ScheduleError, match=message):
        verify(with_order(schedule, 0, order))


@pytest.mark.parametrize(
    ("late", "message"),
    [
        ("F0 I0 F1 I1 W0", "rank 1 lacks W1 of stage 1"),
        ("F0 I0 F1 W0 W1", "rank 1 lacks I1 of stage 1"),
        ("F0 I0 F1 I1 W0 B1", "both whole"),
        ("F0 B0 F1 I1 W0 W1", "both whole"),
        ("F0 I0 F1 I1 W1 W0", "already run the backward of micro-batch 1"),
        ("F0 F1 I1 I0 W0 W1", "already run the backward of micro-batch 1"),
    ],
)
def test_wrong_halves(late: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(split_backward(late))


def test_doubled_action() -> None:
    schedule = one_f_one_b(2, 4)
    order = list(schedule.orders[1])
    order.insert(3, order[0])
    with pytest.raises(ScheduleError, match=r"rank 1, action 3 \(F0\): stage 1 runs F0 twice") as caught:
        verify(with_order(schedule, 1, order))
    assert "  rank 1: 0 F0 | 1 B0 | 2 F1 | [3 F0] | 4 B1 | 5 F2 | 6 B2 ..." in str(caught.value)


def test_wrong_rank() -> None:
    schedule = one_f_one_b(2, 2)
    swapped = replace(schedule, orders=schedule.orders[::-1])
    with pytest.raises(ScheduleError, match=r"rank 0, action 0 \(F0\): stage 1 lives on rank 1"):
        verify(swapped)
    with pytest.raises(ScheduleError, match="1 orders for 2 ranks"):
        verify(replace(schedule, orders=schedule.orders[:1]))


@pytest.mark.parametrize(
    ("action", "message"),
    [(Action(F, 2, 0), "stage 2 does not exist"), (Action(F, 0, 9), "micro-batch 9 does not exist")],
)
def test_unknown_action(action: Action, message: str) -> None:
    schedule = one_f_one_b(2, 2)
    with pytest.raises(ScheduleError, match=message):
        verify(with_order(schedule, 0, [action, *schedule.orders[0]]))


def test_backward_in_evaluation() -> None:
    schedule = forward_only(2, 2)
    with pytest.raises(ScheduleError, match="has no backward"):
        verify(with_order(schedule, 1, [*schedule.orders[1], Action(B, 1, 0)]))


def test_dependency_cycle() -> None:
    # rank 0 wants B0 before it sends F1, rank 1 wants F1 before it runs B0
    order = [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]
    with pytest.raises(ScheduleError, match=r"rank 0 stops at action 1, B0 of stage 0, which waits for B0 of stage 1"):
        verify(with_order(gpipe(2, 2), 0, order))


def test_backward_before_its_forward() -> None:
    order = [Action(B, 0, 0), Action(F, 0, 0)]
    with pytest.raises(ScheduleError, match="waits for F0 of stage 0"):
        verify(with_order(gpipe(1, 1), 0, order))


def test_descending_backward() -> None:
    schedule = gpipe(2, 3)
    order = [*schedule.orders[1][:3], *reversed(schedule.orders[1][3:])]
    with pytest.raises(ScheduleError, match=r"rank 1, action 4 \(B1\): .*micro-batch 2; gradients add up in ascending"):
        verify(with_order(schedule, 1, order))


# ---- wrong programs --------------------------------------------------------------------------------------------------


def with_steps(program: Program, rank: int, steps: list[Instruction]) -> Program:
    instructions = list(program.instructions)
    instructions[rank] = tuple(steps)
    return replace(program, instructions=tuple(instructions))


def steps_of(program: Program, rank: int) -> list[Instruction]:
    return list(program.instructions[rank])


def test_lowered_program_is_right() -> None:
    schedule = interleaved_one_f_one_b(2, 4, 2)
    assert verify(lower(schedule)) == verify(schedule)
    assert verify(schedule).peaks == simulate(schedule).peaks


@pytest.mark.parametrize("kind", [Send, Recv])
def test_missing_and_doubled_transfers(kind: type) -> None:
    program = lower(one_f_one_b(2, 2))
    steps = steps_of(program, 1)
    position = next(n for n, step in enumerate(steps) if isinstance(step, kind))
    with pytest.raises(ScheduleError, match=f"rank 1, instruction 7: '{kind.__name__.lower()} .*' is missing"):
        verify(with_steps(program, 1, steps[:position] + steps[position + 1 :]))
    with pytest.raises(ScheduleError, match=f"instruction {position + 1} .*listed twice"):
        verify(with_steps(program, 1, [*steps[: position + 1], *steps[position:]]))


def test_transfer_that_nobody_needs() -> None:
    program = lower(one_f_one_b(2, 2))
    stray = Send(Transfer(F, 0, 1, 7, 0, 1))
    with pytest.raises(ScheduleError, match="nobody needs"):
        verify(with_steps(program, 0, [*steps_of(program, 0), stray]))


def test_transfer_on_another_rank() -> None:
    program = lower(one_f_one_b(3, 2))
    stray = next(step for step in program.instructions[0] if isinstance(step, Send))
    with pytest.raises(ScheduleError, match=r"rank 2, instruction 0 .*belongs to rank 0"):
        verify(with_steps(program, 2, [stray, *steps_of(program, 2)]))


def test_computes_in_another_order_than_the_schedule() -> None:
    program = lower(gpipe(1, 2))
    steps = steps_of(program, 0)
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 0 \(F1\): the schedule has F0 here"):
        verify(with_steps(program, 0, [steps[1], steps[0], *steps[2:]]))
    with pytest.raises(ScheduleError, match="3 actions, the schedule has 4"):
        verify(with_steps(program, 0, steps[:3]))


def test_swapped_receives() -> None:
    program = lower(gpipe(2, 3))
    steps = steps_of(program, 1)
    first, second = (n for n, step in enumerate(steps) if isinstance(step, Recv) and step.transfer.microbatch < 2)
    steps[first], steps[second] = steps[second], steps[first]
    with pytest.raises(ScheduleError, match=r"would arrive at rank 1, instruction 0 \('recv F1 from 0'\)"):
        verify(with_steps(program, 1, steps))


def test_receive_after_its_use() -> None:
    program = lower(gpipe(2, 2))
    steps = steps_of(program, 1)
    assert steps[:2] == [Recv(Transfer(F, 0, 1, 0, 0, 1)), Compute(Action(F, 1, 0))]
    steps[:2] = steps[1::-1]
    with pytest.raises(ScheduleError, match=r"rank 1, instruction 0 \(F0\): F0 of stage 0 is not on rank 1 yet"):
        verify(with_steps(program, 1, steps))


def test_send_before_its_compute() -> None:
    program = lower(gpipe(2, 2))
    steps = steps_of(program, 0)
    steps[:2] = steps[1::-1]
    with pytest.raises(ScheduleError, match=r"rank 0, instruction 0 \(send F0 to 1\): F0 of stage 0 is not on rank 0"):
        verify(with_steps(program, 0, steps))


def test_deadlock_under_blocking_sends() -> None:
    # The usual mistake: send at once, receive at the last moment. Each connection is in order, but both ranks send.
    program = lower(one_f_one_b(2, 4))
    for rank in range(2):
        lazy: list[Instruction] = []
        recvs = {step.transfer: step for step in program.instructions[rank] if isinstance(step, Recv)}
        for step in program.instructions[rank]:
            if isinstance(step, Compute):
                kind, stage, microbatch = step.action
                wanted = [t for t in recvs if (t.kind, t.target_stage, t.microbatch) == (kind, stage, microbatch)]
                lazy += [recvs[transfer] for transfer in wanted]
            if not isinstance(step, Recv):
                lazy.append(step)
        program = with_steps(program, rank, lazy)
    with pytest.raises(ScheduleError, match=r"deadlock with blocking sends: rank 0 .*send F1.*rank 1 .*send B0"):
        verify(program)


def test_wrong_number_of_lists() -> None:
    program = lower(gpipe(2, 1))
    with pytest.raises(ScheduleError, match="1 instruction lists for 2 ranks"):
        verify(replace(program, instructions=program.instructions[:1]))
