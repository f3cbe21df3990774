"""Lowering: from what each rank computes to what each rank does, that is with sends and receives.

Decisions:
- An activation goes to the next stage after every F, an input gradient to the previous stage after every B or I. Stages
  on one rank hand over locally, without a transfer.
- A receive is listed as early as its tensor can exist, not just before its use. The runtime posts it without waiting
  when it gets there and waits for it in the action that consumes it, so communication overlaps computation.

Why the result cannot deadlock, even if every send blocks until its receive is reached (rendezvous): give each event
of the whole pipeline a key in simulated unit time. A compute's key is its start; a transfer, one event in which two
ranks take part, has the finish of its producer; at equal times transfers come before computes, and remaining ties
are broken by rank, stage, micro-batch and kind. Costs are positive, so a producer's key lies before its transfer's, a
transfer's before its consumer's, and a rank's actions keep their order: the keys are a total order that contains the
dependency order. Each rank's list is this one order restricted to that rank. Now take the first event that has not
happened yet. All earlier events of the one or two ranks that it concerns have happened, so both stand at this event,
and everything it depends on is earlier and has happened too: it can run. So something can always run until the end.
For the same reason the two ends of a connection list its transfers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megalite.pipeline.schedules import Action, Kind, Schedule
from megalite.pipeline.simulate import CostModel, run_orders

__all__ = [
    "Compute",
    "Instruction",
    "Program",
    "Recv",
    "Send",
    "Transfer",
    "instruction_label",
    "lower",
    "transfer_into",
    "transfer_out_of",
]


class Transfer(NamedTuple):
    """One tensor on its way: an activation (kind F) to the next stage, or a gradient (kind B) to the previous one."""

    kind: Kind
    source_stage: int
    target_stage: int
    microbatch: int
    source_rank: int
    target_rank: int


# Dataclasses, not tuples: a Send and a Recv of the same transfer must not compare equal.
@dataclass(frozen=True, slots=True)
class Compute:
    """Run one action of the schedule."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Hand a tensor that this rank has computed to another rank."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Recv:
    """Take a tensor from another rank; a later Compute of this rank consumes it."""

    transfer: Transfer


Instruction = Compute | Send | Recv


@dataclass(frozen=True)
class Program:
    """A schedule with its transfers: instructions[rank] is what that rank does, in order."""

    schedule: Schedule
    instructions: tuple[tuple[Instruction, ...], ...]


def transfer_out_of(schedule: Schedule, action: Action) -> Transfer | None:
    """The transfer that carries this action's result away; None when it stays on its rank or nobody needs it."""
    if action.kind == Kind.WEIGHT_GRAD:
        return None
    forward = action.kind == Kind.FORWARD
    return _transfer(schedule, forward, action.stage, action.stage + (1 if forward else -1), action.microbatch)


def transfer_into(schedule: Schedule, action: Action) -> Transfer | None:
    """The transfer that this action consumes; None when its input is made on its own rank (or comes from the data)."""
    if action.kind == Kind.WEIGHT_GRAD:
        return None
    forward = action.kind == Kind.FORWARD
    return _transfer(schedule, forward, action.stage - (1 if forward else -1), action.stage, action.microbatch)


def _transfer(schedule: Schedule, forward: bool, source: int, target: int, microbatch: int) -> Transfer | None:
    if not (0 <= source < schedule.num_stages and 0 <= target < schedule.num_stages):
        return None
    source_rank, target_rank = schedule.placement[source], schedule.placement[target]
    if source_rank == target_rank:
        return None
    kind = Kind.FORWARD if forward else Kind.BACKWARD
    return Transfer(kind, source, target, microbatch, source_rank, target_rank)


def lower(schedule: Schedule) -> Program:
    """Add the transfers. Raises ScheduleError when the orders never finish or repeat an action; `verify` finds more."""
    # (time, transfer first, rank, stage, micro-batch, kind), then for each rank concerned its instruction
    events: list[tuple[tuple[float, int, int, int, int, str], list[tuple[int, Instruction]]]] = []
    for action, (start, finish) in run_orders(schedule, CostModel()).items():
        rank = schedule.placement[action.stage]
        tie = (rank, action.stage, action.microbatch, action.kind.value)
        events.append(((start, 1, *tie), [(rank, Compute(action))]))
        transfer = transfer_out_of(schedule, action)
        if transfer is not None:
            ends = [(rank, Send(transfer)), (transfer.target_rank, Recv(transfer))]
            events.append(((finish, 0, *tie), ends))
    instructions: list[list[Instruction]] = [[] for _ in range(schedule.num_ranks)]
    for _, concerned in sorted(events, key=lambda event: event[0]):
        for rank, instruction in concerned:
            instructions[rank].append(instruction)
    return Program(schedule, tuple(map(tuple, instructions)))


def instruction_label(schedule: Schedule, instruction: Instruction) -> str:
    """Short name for tables and messages: `F3`, `send F3 to 1` (activation), `recv B3 from 1` (gradient)."""
    if isinstance(instruction, Compute):
        return schedule.label(instruction.action)
    transfer = instruction.transfer
    tensor = schedule.label(Action(transfer.kind, transfer.source_stage, transfer.microbatch))
    if isinstance(instruction, Send):
        return f"send {tensor} to {transfer.target_rank}"
    return f"recv {tensor} from {transfer.source_rank}"
