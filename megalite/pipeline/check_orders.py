"""The part of the proof that looks at a schedule alone: its numbers, its completeness, its gradient order, its memory.

`verify` calls this and goes on with the transfers. Messages name rank and action and show the actions around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from megalite.errors import ScheduleError
from megalite.pipeline.schedules import Action, Kind, Schedule

__all__ = ["check_memory", "check_schedule", "fail"]


def check_schedule(schedule: Schedule) -> None:
    """Numbers that fit, every action once on the right rank, gradients in ascending order. Raises ScheduleError."""
    _check_shape(schedule)
    _check_complete(schedule)
    _check_gradient_order(schedule)


def check_memory(schedule: Schedule, max_activations: int) -> None:
    """No rank ever holds more chunk activations, each freed at the end of B or W. Raises ScheduleError."""
    for rank, order in enumerate(schedule.orders):
        alive = 0
        for number, action in enumerate(order):
            alive += action.kind is Kind.FORWARD
            if alive > max_activations:
                _fail_in_order(schedule, rank, number, f"this is activation number {alive} at once, at most {max_activations} are allowed")
            alive -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD) if schedule.has_backward else 1


def _check_shape(schedule: Schedule) -> None:
    name, num_ranks = schedule.name, schedule.num_ranks
    if len(schedule.orders) != num_ranks:
        raise ScheduleError(f"{name} has {len(schedule.orders)} orders for {num_ranks} ranks")
    if min(num_ranks, schedule.num_microbatches, schedule.num_chunks) < 1:
        raise ScheduleError(f"{name} needs at least 1 rank, micro-batch and chunk per rank")
    for rank in range(num_ranks):
        if schedule.placement.count(rank) != schedule.num_chunks:
            raise ScheduleError(
                f"{name} places stages on ranks {list(schedule.placement)}: rank {rank} has {schedule.placement.count(rank)}, "
                f"every rank must have {schedule.num_chunks}"
            )
    if schedule.num_stages != num_ranks * schedule.num_chunks:
        raise ScheduleError(f"{name} places stages on ranks {list(schedule.placement)}, there are only ranks 0 to {num_ranks - 1}")


def _check_complete(schedule: Schedule) -> None:
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        for number, action in enumerate(order):
            problem = _action_problem(schedule, rank, action, seen)
            if problem:
                _fail_in_order(schedule, rank, number, problem)
            seen.add(action)
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.num_microbatches):
            missing = _missing_kinds(schedule, stage, microbatch, seen)
            if missing:
                marks = {rank: len(schedule.orders[rank])}
                fail(_order_labels(schedule), marks, f"rank {rank} lacks {' or '.join(missing)}{microbatch} of stage {stage}")


def _action_problem(schedule: Schedule, rank: int, action: Action, seen: set[Action]) -> str | None:
    kind, stage, microbatch = action
    if not 0 <= stage < schedule.num_stages:
        return f"stage {stage} does not exist, there are {schedule.num_stages}"
    if not 0 <= microbatch < schedule.num_microbatches:
        return f"micro-batch {microbatch} does not exist, there are {schedule.num_microbatches}"
    if schedule.placement[stage] != rank:
        return f"stage {stage} lives on rank {schedule.placement[stage]}"
    if action in seen:
        return f"stage {stage} runs {kind}{microbatch} twice"
    if kind != Kind.FORWARD and not schedule.has_backward:
        return "this schedule has no backward"
    halves = {action._replace(kind=half) for half in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD)}
    whole = action._replace(kind=Kind.BACKWARD)
    if (kind == Kind.BACKWARD and seen & halves) or (action in halves and whole in seen):
        return f"stage {stage} runs the backward of micro-batch {microbatch} both whole (B) and in halves (I, W)"
    return None


def _missing_kinds(schedule: Schedule, stage: int, microbatch: int, seen: set[Action]) -> list[Kind]:
    has = {kind: Action(kind, stage, microbatch) in seen for kind in Kind}
    if not has[Kind.FORWARD]:
        return [Kind.FORWARD]
    if not schedule.has_backward or has[Kind.BACKWARD] or (has[Kind.INPUT_GRAD] and has[Kind.WEIGHT_GRAD]):
        return []
    if has[Kind.INPUT_GRAD] or has[Kind.WEIGHT_GRAD]:
        return [Kind.WEIGHT_GRAD if has[Kind.INPUT_GRAD] else Kind.INPUT_GRAD]
    return [Kind.BACKWARD]


def _check_gradient_order(schedule: Schedule) -> None:
    # Weights of matrices get their gradient in B or W, everything else may get it in B or I: both orders count.
    for half in (Kind.INPUT_GRAD, Kind.WEIGHT_GRAD):
        latest = [-1] * schedule.num_stages
        for rank, order in enumerate(schedule.orders):
            for number, action in enumerate(order):
                if action.kind is not Kind.BACKWARD and action.kind is not half:
                    continue
                if action.microbatch < latest[action.stage]:
                    _fail_in_order(
                        schedule,
                        rank,
                        number,
                        f"stage {action.stage} has already run the backward of micro-batch {latest[action.stage]}; "
                        "gradients add up in ascending order, so that every schedule gives the same numbers",
                    )
                latest[action.stage] = action.microbatch


# ---- messages --------------------------------------------------------------------------------------------------------


def _order_labels(schedule: Schedule) -> list[list[str]]:
    return [[schedule.label(action) for action in order] for order in schedule.orders]


def _fail_in_order(schedule: Schedule, rank: int, number: int, text: str) -> NoReturn:
    table = _order_labels(schedule)
    fail(table, {rank: number}, f"rank {rank}, action {number} ({table[rank][number]}): {text}")


def fail(table: Sequence[Sequence[str]], marks: Mapping[int, int], text: str) -> NoReturn:
    """Raise with the marked place of each rank and its neighbours, e.g. `rank 1: ... 2 F1 | [3 B0] | 4 F2 ...`."""
    lines = [text]
    for rank, mark in marks.items():
        cells = [*table[rank], "end"]
        first, last = max(0, mark - 3), min(len(cells), mark + 4)
        shown = [f"[{n} {cells[n]}]" if n == mark else f"{n} {cells[n]}" for n in range(first, last)]
        left, right = "... " if first else "", " ..." if last < len(cells) else ""
        lines.append(f"  rank {rank}: {left}{' | '.join(shown)}{right}")
    raise ScheduleError("\n".join(lines))
