"""Schedules that a user wrote: a table in a CSV or JSON file, or a Python function.

Cells name a global stage, a kind and a micro-batch: `3F0` is the forward of micro-batch 0 on stage 3, B a full backward,
I and W its halves. An empty cell means nothing. `(3F4;0B1)OVERLAP_F_B` is a forward and a backward that are meant to
overlap; it stands for the two consecutive actions. PyTorch's pipeline schedules write the same cells to their CSV files
(compute only), so the files can be exchanged.

- CSV: one line per rank, rank 0 first, cells between commas; lines that start with # are comments.
- JSON: {"ranks": [["0F0", "0B0"], ["1F0", "1B0"]]}, one list per rank; "name" is optional.
- Python: `path/to/my_schedule.py:function`. The function is called with (num_ranks, num_microbatches, num_chunks) and
  returns a Schedule, or one list per rank of cells or Actions. The file is executed: only name files that you trust.

Which rank holds a stage is read off the table. Errors name the file, the line (or rank) and the cell.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megalite.errors import ScheduleError
from megalite.pipeline.schedules.actions import Action, Kind, Schedule

__all__ = ["is_written_by_user", "load_schedule", "schedule_from_cells", "write_schedule"]

_CELL = re.compile(r"(\d+)([FBIW])(\d+)", re.ASCII)
_PAIR = re.compile(r"\((\d+F\d+);(\d+B\d+)\)OVERLAP_F_B", re.ASCII)
_FUNCTION = re.compile(r"(.+\.py):([A-Za-z_]\w*)")

Row = tuple[str, list[tuple[str, Any]]]  # how messages call this rank, [(how they call the cell, its content)]


def is_written_by_user(name: str) -> bool:
    """Whether a schedule's name is the spelling of a file: `x.csv`, `x.json` or `x.py:function`."""
    return name.endswith((".csv", ".json")) or _FUNCTION.fullmatch(name) is not None


def load_schedule(source: str, num_ranks: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """The schedule in a file, or made by a function in one. It is not yet proven: see `verify`.

    Raises ScheduleError when it cannot be read, or is for other numbers than these.
    """
    function = _FUNCTION.fullmatch(source)
    if function:
        made = _call(source, Path(function[1]), function[2], (num_ranks, num_microbatches, num_chunks))
        schedule = made if isinstance(made, Schedule) else _from_lists(source, made)
    else:
        rows = _csv_rows(source) if source.endswith(".csv") else _json_rows(source)
        schedule = _assemble(source, rows)
    _check_numbers(source, schedule, num_ranks, num_microbatches, num_chunks)
    return schedule


def schedule_from_cells(name: str, ranks: Sequence[Sequence[str | Action]]) -> Schedule:
    """A schedule out of one list of cells (or Actions) per rank. Raises ScheduleError naming rank and cell."""
    return _from_lists(name, ranks)


def write_schedule(schedule: Schedule) -> str:
    """The text of a CSV file that gives this schedule back (all but its name)."""
    lines = []
    for order in schedule.orders:
        cells, skip = [], False
        for action, following in zip(order, [*order[1:], None], strict=True):
            if skip:
                skip = False
            elif action in schedule.overlapped and following is not None:
                cells.append(f"({_cell(action)};{_cell(following)})OVERLAP_F_B")
                skip = True
            else:
                cells.append(_cell(action))
        lines.append(",".join(cells))
    return "\n".join(lines) + "\n"


def _cell(action: Action) -> str:
    return f"{action.stage}{action.kind}{action.microbatch}"


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(source: str) -> str:
    try:
        return Path(source).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ScheduleError(f"cannot read schedule {source}: {error}") from error


def _csv_rows(source: str) -> list[Row]:
    reader = csv.reader(_read(source).splitlines())
    rows = []
    for cells in reader:
        if not cells or cells[0].lstrip().startswith("#"):
            continue
        where = f"line {reader.line_num}"
        rows.append((where, [(f"{where}, cell {n}", cell.strip()) for n, cell in enumerate(cells, 1)]))
    return rows


def _json_rows(source: str) -> list[Row]:
    try:
        data = json.loads(_read(source))
    except json.JSONDecodeError as error:
        raise ScheduleError(f"{source}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}") from error
    if not isinstance(data, dict) or not isinstance(data.get("ranks"), list) or set(data) - {"ranks", "name"}:
        raise ScheduleError(f'{source}: a schedule is {{"ranks": [["0F0", ...], ...]}}, with one list per rank and perhaps a "name"')
    return _list_rows(source, data["ranks"])


def _list_rows(source: str, ranks: Any) -> list[Row]:
    if isinstance(ranks, str) or not isinstance(ranks, Iterable):
        raise ScheduleError(f"{source}: a schedule is one list of cells per rank, got {type(ranks).__name__}")
    rows = []
    for rank, cells in enumerate(ranks):
        if isinstance(cells, str) or not isinstance(cells, Iterable):
            raise ScheduleError(f"{source}: rank {rank} is {cells!r}, not a list of cells")
        rows.append((f"rank {rank}", [(f"rank {rank}, cell {n}", cell) for n, cell in enumerate(cells, 1)]))
    return rows


def _from_lists(source: str, ranks: Any) -> Schedule:
    return _assemble(source, _list_rows(source, ranks))


def _call(source: str, path: Path, function: str, numbers: tuple[int, int, int]) -> Any:
    """Execute the file and call its function."""
    if not path.is_file():
        raise ScheduleError(f"cannot read schedule {source}: there is no file {path}")
    name = f"megalite_schedule_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in the file look their module up
    try:
        spec.loader.exec_module(module)
        if not callable(getattr(module, function, None)):
            raise ScheduleError(f"{path} has no function {function}")
        return getattr(module, function)(*numbers)
    except ScheduleError:
        raise
    except Exception as error:
        raise ScheduleError(f"schedule {source} failed with {type(error).__name__}: {error}") from error
    finally:
        del sys.modules[name]


# ---- from cells to a schedule ----------------------------------------------------------------------------------------


def _assemble(source: str, rows: Sequence[Row]) -> Schedule:
    orders: list[tuple[Action, ...]] = []
    overlapped: list[Action] = []
    owner: dict[int, int] = {}
    for rank, (where, cells) in enumerate(rows):
        order: list[Action] = []
        for place, cell in cells:
            actions = _parse(f"{source}: {place}", cell)
            if len(actions) == 2:
                overlapped.append(actions[0])
            for action in actions:
                if owner.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(f"{source}: {place}: {cell!r} is on stage {action.stage}, which rank {owner[action.stage]} has too")
            order += actions
        if not order:
            raise ScheduleError(f"{source}: {where}: rank {rank} has no action")
        orders.append(tuple(order))
    placement = _placement(source, owner, len(orders))
    actions = [action for order in orders for action in order]
    return Schedule(
        name=source,
        num_ranks=len(orders),
        num_microbatches=1 + max(action.microbatch for action in actions),
        num_chunks=len(placement) // len(orders),
        placement=placement,
        orders=tuple(orders),
        has_backward=any(action.kind is not Kind.FORWARD for action in actions),
        overlapped=frozenset(overlapped),
    )


def _parse(place: str, cell: Any) -> list[Action]:
    if isinstance(cell, Action):
        return [cell]
    if cell == "" or cell is None:
        return []
    pair = _PAIR.fullmatch(cell) if isinstance(cell, str) else None
    matches = [_CELL.fullmatch(part) for part in (pair.groups() if pair else (cell,)) if isinstance(part, str)]
    found = [Action(Kind(match[2]), int(match[1]), int(match[3])) for match in matches if match]
    if not found:
        raise ScheduleError(f"{place}: {cell!r} is not an action: write stage, kind (F, B, I or W) and micro-batch, such as 3F0")
    return found


def _placement(source: str, owner: dict[int, int], num_ranks: int) -> tuple[int, ...]:
    if not owner:
        raise ScheduleError(f"{source}: the schedule has no ranks")
    missing = [stage for stage in range(max(owner)) if stage not in owner]
    if missing:
        raise ScheduleError(f"{source}: stage {missing[0]} is on no rank, although there is a stage {max(owner)}")
    placement = tuple(owner[stage] for stage in range(len(owner)))
    counts = [placement.count(rank) for rank in range(num_ranks)]
    if len(set(counts)) != 1:
        raise ScheduleError(
            f"{source}: the ranks have {', '.join(map(str, counts))} stages; every rank needs the same number of model chunks"
        )
    return placement


def _check_numbers(source: str, schedule: Schedule, num_ranks: int, num_microbatches: int, num_chunks: int) -> None:
    found = (schedule.num_ranks, schedule.num_microbatches, schedule.num_chunks)
    if found != (num_ranks, num_microbatches, num_chunks):
        raise ScheduleError(
            "{} is for {} pipeline ranks, {} micro-batches and {} model chunks per rank; the run has {}, {} and {}: "
            "change the run, or the schedule".format(source, *found, num_ranks, num_microbatches, num_chunks)
        )
