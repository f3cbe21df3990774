"""Pipeline schedules as data: for each rank, the list of actions it computes, in order.

Decisions:
- A schedule never touches a tensor. The same object is lowered (transfers are added), verified, simulated, drawn and
  executed.
- Backward passes of a stage, and weight gradients of a stage, run in ascending micro-batch order in every schedule.
  Gradients are therefore added up in one order, and a run's numbers do not depend on its schedule.
- A schedule is a small pure function in a file of its kind: `classic` (undivided backward), `zero_bubble` (ZB-H1,
  ZB-H2), `zero_bubble_auto` (ZB-1p, ZB-2p), `v_shape` (ZB-V, DualPipeV), `v_pattern` (V-Half, V-Min), `files` (the
  user's own). `registry` knows them by name.
"""

from __future__ import annotations

from megalite.pipeline.schedules.actions import Action, Kind, Schedule, dependencies, product, round_robin, v_placement
from megalite.pipeline.schedules.classic import forward_only, gpipe, interleaved_one_f_one_b, looped_bfs, one_f_one_b
from megalite.pipeline.schedules.costs import CostModel
from megalite.pipeline.schedules.files import is_written_by_user, schedule_from_cells, write_schedule
from megalite.pipeline.schedules.registry import SCHEDULES, Recipe, ScheduleOptions, build_schedule, schedule_violations
from megalite.pipeline.schedules.v_pattern import v_half, v_min
from megalite.pipeline.schedules.v_shape import dualpipe_v, zb_v
from megalite.pipeline.schedules.zero_bubble import zb_h1, zb_h2
from megalite.pipeline.schedules.zero_bubble_auto import zb_auto

__all__ = [
    "SCHEDULES",
    "Action",
    "CostModel",
    "Kind",
    "Recipe",
    "Schedule",
    "ScheduleOptions",
    "build_schedule",
    "dependencies",
    "dualpipe_v",
    "forward_only",
    "gpipe",
    "interleaved_one_f_one_b",
    "is_written_by_user",
    "looped_bfs",
    "one_f_one_b",
    "product",
    "round_robin",
    "schedule_from_cells",
    "schedule_violations",
    "v_half",
    "v_min",
    "v_placement",
    "write_schedule",
    "zb_auto",
    "zb_h1",
    "zb_h2",
    "zb_v",
]
