"""Proof that a schedule or program is right, whoever wrote it, before any process runs it.

What is proved, in this order:
0. the numbers fit together: one order per rank, as many stages on each, every stage on a rank that exists;
1. every stage computes each micro-batch's forward once and its backward once (B, or I and W), on the stage's rank;
2. each stage adds up gradients in ascending micro-batch order, so that all schedules give the same bits;
3. the program computes the schedule's orders, and has each needed send and each needed receive once, on the right rank;
4. both ends of each directed connection list its transfers in the same order;
5. everything an action or a send needs was computed or received earlier on its own rank;
6. no deadlock when every send blocks until its receive is reached, and then none when it does not block either;
7. on request: no rank ever holds more activations than a limit.

Nothing of the lowering's arithmetic is used here: the needed transfers come from the placement, and 6 is a simulation
of its own. Messages name rank and instruction number, and show the instructions around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from megalite.errors import ScheduleError
from megalite.pipeline.check_orders import check_memory, check_schedule, fail
from megalite.pipeline.lowering import Compute, Instruction, Program, Recv, Send, Transfer, instruction_label, lower
from megalite.pipeline.schedules import Action, Kind, Schedule, dependencies, product
from megalite.pipeline.simulate import peak_activations

__all__ = ["Proof", "verify"]


@dataclass(frozen=True)
class Proof:
    """What a verified program needs. All tuples hold one number per rank.

    peaks: most chunk activations alive at once, freed at the end of B or W; peaks_at_input_grad: freed at B or I.
    peak_received: most tensors that have been listed to receive and are not yet consumed. num_transfers: per step.
    """

    peaks: tuple[int, ...]
    peaks_at_input_grad: tuple[int, ...]
    peak_received: tuple[int, ...]
    num_transfers: int


def verify(subject: Schedule | Program, max_activations: int | None = None) -> Proof:
    """Prove all of the above. Raises ScheduleError with the offending rank, instruction and its neighbours.

    max_activations: most chunk activations that a rank may hold at once, each freed at the end of B or W.
    """
    schedule = subject.schedule if isinstance(subject, Program) else subject
    check_schedule(schedule)
    program = subject if isinstance(subject, Program) else lower(schedule)
    _check_computes(program)
    _check_transfers(program)
    _check_connections(program)
    peak_received = _check_inputs(program)
    _check_rendezvous(program)
    if max_activations is not None:
        check_memory(schedule, max_activations)
    return Proof(
        peaks=peak_activations(schedule),
        peaks_at_input_grad=peak_activations(schedule, Kind.INPUT_GRAD),
        peak_received=peak_received,
        num_transfers=sum(isinstance(instruction, Send) for rank in program.instructions for instruction in rank),
    )


# ---- 3 to 6: the program ---------------------------------------------------------------------------------------------


def _check_computes(program: Program) -> None:
    if len(program.instructions) != program.schedule.num_ranks:
        raise ScheduleError(f"the program has {len(program.instructions)} instruction lists for {program.schedule.num_ranks} ranks")
    for rank, order in enumerate(program.schedule.orders):
        computes = [(n, step.action) for n, step in enumerate(program.instructions[rank]) if isinstance(step, Compute)]
        for (number, action), expected in zip(computes, order, strict=False):
            if action != expected:
                _fail_at(program, rank, number, f"the schedule has {program.schedule.label(expected)} here")
        if len(computes) != len(order):
            number = len(program.instructions[rank])
            _fail_at(program, rank, number, f"{len(computes)} actions, the schedule has {len(order)}")


def _needed_transfers(schedule: Schedule) -> Iterator[Transfer]:
    for left in range(schedule.num_stages - 1):
        right = left + 1
        left_rank, right_rank = schedule.placement[left], schedule.placement[right]
        if left_rank == right_rank:
            continue
        for microbatch in range(schedule.num_microbatches):
            yield Transfer(Kind.FORWARD, left, right, microbatch, left_rank, right_rank)
            if schedule.has_backward:
                yield Transfer(Kind.BACKWARD, right, left, microbatch, right_rank, left_rank)


def _check_transfers(program: Program) -> None:
    needed = set(_needed_transfers(program.schedule))
    listed: set[Send | Recv] = set()
    for rank, steps in enumerate(program.instructions):
        for number, step in enumerate(steps):
            if isinstance(step, Compute):
                continue
            at_home = step.transfer.source_rank if isinstance(step, Send) else step.transfer.target_rank
            if step.transfer not in needed:
                _fail_at(program, rank, number, f"nobody needs {step.transfer}")
            if at_home != rank:
                _fail_at(program, rank, number, f"this belongs to rank {at_home}")
            if step in listed:
                _fail_at(program, rank, number, "listed twice")
            listed.add(step)
    for transfer in sorted(needed):
        for step, rank in ((Send(transfer), transfer.source_rank), (Recv(transfer), transfer.target_rank)):
            if step not in listed:
                text = f"'{instruction_label(program.schedule, step)}' is missing"
                _fail_at(program, rank, len(program.instructions[rank]), text)


def _check_connections(program: Program) -> None:
    """Transfers between two ranks carry no name on the wire: the k-th send meets the k-th receive."""
    sends: dict[tuple[int, int], list[tuple[int, Transfer]]] = {}
    recvs: dict[tuple[int, int], list[tuple[int, Transfer]]] = {}
    for steps in program.instructions:
        for number, step in enumerate(steps):
            if not isinstance(step, Compute):
                side, transfer = (sends if isinstance(step, Send) else recvs), step.transfer
                side.setdefault((transfer.source_rank, transfer.target_rank), []).append((number, transfer))
    for (source, target), sent in sends.items():
        for (at_source, transfer), (at_target, other) in zip(sent, recvs[source, target], strict=True):
            if transfer != other:
                table = _labels(program)
                fail(
                    table,
                    {source: at_source, target: at_target},
                    f"rank {source}, instruction {at_source} ('{table[source][at_source]}') would arrive at rank "
                    f"{target}, instruction {at_target} ('{table[target][at_target]}'): the ends have different orders",
                )


def _check_inputs(program: Program) -> tuple[int, ...]:
    """Each rank's list alone: inputs are there before they are used. Returns the most tensors waiting for their use."""
    peaks = []
    for rank, steps in enumerate(program.instructions):
        here: set[Action] = set()  # products computed or received so far
        unread = peak = 0
        for number, step in enumerate(steps):
            if isinstance(step, Recv):
                here.add(_payload(step.transfer))
                unread += 1
                peak = max(peak, unread)
                continue
            sending = isinstance(step, Send)
            needed = [_payload(step.transfer)] if sending else dependencies(step.action, program.schedule.num_stages)
            for need in needed:
                if need not in here:
                    text = f"{need.kind}{need.microbatch} of stage {need.stage} is not on rank {rank} yet"
                    _fail_at(program, rank, number, text)
                unread -= not sending and program.schedule.placement[need.stage] != rank
            if isinstance(step, Compute):
                here.add(product(step.action))
        peaks.append(peak)
    return tuple(peaks)


def _payload(transfer: Transfer) -> Action:
    return Action(transfer.kind, transfer.source_stage, transfer.microbatch)


def _check_rendezvous(program: Program) -> None:
    """Step all ranks; a transfer happens when both ends stand at it. Non-blocking sends can only get further."""
    at = [0] * len(program.instructions)

    def head(rank: int) -> Instruction | None:
        return program.instructions[rank][at[rank]] if at[rank] < len(program.instructions[rank]) else None

    awake = list(range(len(at)))
    while awake:
        rank = awake.pop()
        while (step := head(rank)) is not None:
            if not isinstance(step, Compute):
                transfer = step.transfer
                other = transfer.target_rank if isinstance(step, Send) else transfer.source_rank
                if head(other) != (Recv(transfer) if isinstance(step, Send) else Send(transfer)):
                    break
                at[other] += 1
                awake.append(other)
            at[rank] += 1
    stuck = {rank: number for rank, number in enumerate(at) if head(rank) is not None}
    if stuck:
        table = _labels(program)
        waits = ", ".join(f"rank {rank} at instruction {n} ('{table[rank][n]}')" for rank, n in stuck.items())
        fail(table, stuck, f"deadlock with blocking sends: {waits}")


# ---- messages --------------------------------------------------------------------------------------------------------


def _labels(program: Program) -> list[list[str]]:
    return [[instruction_label(program.schedule, step) for step in steps] for steps in program.instructions]


def _fail_at(program: Program, rank: int, number: int, text: str) -> NoReturn:
    table = _labels(program)
    name = f" ({table[rank][number]})" if number < len(table[rank]) else ""
    fail(table, {rank: number}, f"rank {rank}, instruction {number}{name}: {text}")
