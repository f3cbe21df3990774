"""Schedules by name: what builds them, and what is wrong with given numbers before anything is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from megalite.errors import ConfigError, ScheduleError
from megalite.pipeline.schedules import constraints
from megalite.pipeline.schedules.actions import Schedule
from megalite.pipeline.schedules.classic import gpipe, interleaved_one_f_one_b, looped_bfs, one_f_one_b
from megalite.pipeline.schedules.costs import CostModel
from megalite.pipeline.schedules.files import is_written_by_user, load_schedule
from megalite.pipeline.schedules.v_pattern import v_half, v_min
from megalite.pipeline.schedules.v_shape import dualpipe_v, zb_v
from megalite.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from megalite.pipeline.schedules.zero_bubble_auto import zb_auto

__all__ = ["SCHEDULES", "Recipe", "ScheduleOptions", "build_schedule", "schedule_violations"]


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions:
    """What some schedules can be told besides their numbers.

    group_size: micro-batches per group of interleaved-1f1b; None: the smallest that fits. cost: the times that zb-1p
    and zb-2p plan for.
    """

    group_size: int | None = None
    cost: CostModel = field(default_factory=CostModel)


@dataclass(frozen=True)
class Recipe:
    """How to build a schedule from (num_ranks, num_microbatches, num_chunks), and what is wrong with such numbers."""

    build: Callable[[int, int, int, ScheduleOptions], Schedule]
    violations: Callable[[int, int, int], list[str]]


SCHEDULES: Mapping[str, Recipe] = {
    "gpipe": Recipe(lambda p, m, v, o: gpipe(p, m), constraints.one_chunk_violations),
    "1f1b": Recipe(lambda p, m, v, o: one_f_one_b(p, m), constraints.one_chunk_violations),
    "interleaved-1f1b": Recipe(lambda p, m, v, o: interleaved_one_f_one_b(p, m, v, o.group_size), constraints.interleaved_violations),
    "looped-bfs": Recipe(lambda p, m, v, o: looped_bfs(p, m, v), constraints.looped_violations),
    "zb-h1": Recipe(lambda p, m, v, o: zb_h1(p, m), constraints.one_chunk_violations),
    "zb-h2": Recipe(lambda p, m, v, o: zb_h2(p, m), constraints.one_chunk_violations),
    "zb-1p": Recipe(lambda p, m, v, o: zb_auto(p, m, 1, o.cost), constraints.one_chunk_violations),
    "zb-2p": Recipe(lambda p, m, v, o: zb_auto(p, m, 2, o.cost), constraints.one_chunk_violations),
    "zb-v": Recipe(lambda p, m, v, o: zb_v(p, m), constraints.two_chunk_violations),
    "v-half": Recipe(lambda p, m, v, o: v_half(p, m), constraints.two_chunk_violations),
    "v-min": Recipe(lambda p, m, v, o: v_min(p, m), constraints.two_chunk_violations),
    "dualpipe-v": Recipe(lambda p, m, v, o: dualpipe_v(p, m), constraints.dualpipe_violations),
}


def schedule_violations(
    name: str, num_ranks: int, num_microbatches: int, num_chunks: int, options: ScheduleOptions | None = None
) -> list[str]:
    """Why this schedule cannot be built, one sentence each with its remedy; empty when it can.

    A schedule that the user wrote is read (a Python function: run) for this.
    """
    numbers, options = (num_ranks, num_microbatches, num_chunks), options or ScheduleOptions()
    if name not in SCHEDULES and not is_written_by_user(name):
        return [
            f"unknown pipeline schedule {name!r}: use one of {', '.join(SCHEDULES)}, or a file: orders.csv, orders.json "
            "or my_schedule.py:function"
        ]
    violations = constraints.number_violations(*numbers)
    if not violations and name in SCHEDULES:
        violations = SCHEDULES[name].violations(*numbers)
    elif not violations:
        try:
            load_schedule(name, *numbers)
        except ScheduleError as error:
            violations = [str(error)]
    if options.group_size is not None and not violations:
        violations = _group_violations(name, num_ranks, num_microbatches, options.group_size)
    if name in ("zb-1p", "zb-2p") and not violations:
        try:
            options.cost.check_stages(num_ranks)
        except ConfigError as error:
            violations = error.violations
    return [f"pipeline schedule {name}: {text}" for text in violations]


def _group_violations(name: str, num_ranks: int, num_microbatches: int, group_size: int) -> list[str]:
    if name != "interleaved-1f1b":
        return [f"a group size ({group_size}) only means something to interleaved-1f1b: leave it out"]
    return constraints.group_size_violations(num_ranks, num_microbatches, group_size)


def build_schedule(name: str, num_ranks: int, num_microbatches: int, num_chunks: int, options: ScheduleOptions | None = None) -> Schedule:
    """The named schedule, or the one in a file: `orders.csv`, `orders.json`, `my_schedule.py:function` (see files.py).

    What a user wrote is only read here; `verify` proves it. Raises ScheduleError for an unknown name, a file that cannot
    be read, or numbers that the schedule cannot run.
    """
    if is_written_by_user(name) and not constraints.number_violations(num_ranks, num_microbatches, num_chunks):
        return load_schedule(name, num_ranks, num_microbatches, num_chunks)
    options = options or ScheduleOptions()
    violations = schedule_violations(name, num_ranks, num_microbatches, num_chunks, options)
    if violations:
        raise ScheduleError("; ".join(violations))
    return SCHEDULES[name].build(num_ranks, num_microbatches, num_chunks, options)
