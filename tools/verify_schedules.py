"""Prove every schedule for every number of ranks, micro-batches and chunks up to a limit.

    python tools/verify_schedules.py --max-pp 8 --max-microbatches 16 --max-vpp 4

Each schedule that accepts the numbers is built and proven (complete, ordered, paired, free of deadlock, within its
published peak memory), and so is the evaluation order on its placement. The last line is one JSON object with CPU seconds; the exit
status is 1 when anything failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megalite.errors import ScheduleError
from megalite.pipeline.schedules import SCHEDULES, Schedule, ScheduleOptions, build_schedule, forward_only, schedule_violations
from megalite.pipeline.simulate import num_messages
from megalite.pipeline.verify import verify

# (p, m, v) -> most chunk activations that any rank may hold, freed at W or B
PEAK_LIMITS: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: min(p, m),
    "interleaved-1f1b": lambda p, m, v: m * v,
    "looped-bfs": lambda p, m, v: m * v,
    "zb-h1": lambda p, m, v: min(p, m),
    "zb-h2": lambda p, m, v: min(2 * p - 1, m),
    "zb-1p": lambda p, m, v: min(2 * p, m),  # up to 2p that have their input gradient count half
    "zb-2p": lambda p, m, v: min(4 * p, m),
    "zb-v": lambda p, m, v: 2 * p,
    "v-half": lambda p, m, v: 2 * ((p + 2) // 2),
    "v-min": lambda p, m, v: 2 * ((p + 4) // 3),
    "dualpipe-v": lambda p, m, v: 2 * p + 1,
}


@dataclass
class Count:
    """What a sweep has done."""

    schedules: int = 0
    actions: int = 0
    build_s: float = 0.0
    verify_s: float = 0.0


def numbers(max_pp: int, max_microbatches: int, max_vpp: int) -> Iterator[tuple[int, int, int]]:
    for p in range(1, max_pp + 1):
        for m in range(1, max_microbatches + 1):
            yield from ((p, m, v) for v in range(1, max_vpp + 1))


def check(name: str, size: tuple[int, int, int], count: Count, group_size: int | None = None) -> Schedule | None:
    """Build and prove one schedule; None when it does not accept the numbers. Raises ScheduleError."""
    options = ScheduleOptions(group_size=group_size)
    if schedule_violations(name, *size, options):
        return None
    begun = time.process_time()
    schedule = build_schedule(name, *size, options)
    built = time.process_time()
    prove(schedule, PEAK_LIMITS[name](*size), count)
    count.build_s += built - begun
    return schedule


def prove(schedule: Schedule, max_activations: int, count: Count) -> None:
    begun = time.process_time()
    proof = verify(schedule, max_activations)
    count.verify_s += time.process_time() - begun
    if proof.num_transfers != num_messages(schedule):
        raise ScheduleError(f"{proof.num_transfers} transfers, {num_messages(schedule)} messages are needed")
    count.schedules += 1
    count.actions += sum(map(len, schedule.orders))


def sweep(names: Sequence[str], sizes: Iterator[tuple[int, int, int]], count: Count) -> list[str]:
    """All failures, one line each."""
    failures = []
    for size in sizes:
        placements = set()
        for name in names:
            groups = range(size[0], size[1] + 1) if name == "interleaved-1f1b" else (None,)
            try:
                made = [check(name, size, count, group) for group in groups]
                placements |= {schedule.placement for schedule in made if schedule is not None}
            except ScheduleError as error:
                failures.append(f"{name} p={size[0]} m={size[1]} v={size[2]}: {error}")
        for placement in placements:
            try:
                prove(forward_only(*size, placement), 1, count)
            except ScheduleError as error:
                failures.append(f"forward-only on {placement} m={size[1]}: {error}")
    return failures


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Prove every schedule for all small numbers.")
    parser.add_argument("--schedule", nargs="+", choices=list(SCHEDULES), default=list(SCHEDULES), help="by default all")
    parser.add_argument("--max-pp", type=int, default=8, help="most pipeline ranks")
    parser.add_argument("--max-microbatches", type=int, default=16, help="most micro-batches per step")
    parser.add_argument("--max-vpp", type=int, default=4, help="most model chunks per rank")
    options = parser.parse_args(arguments)
    count = Count()
    failures = sweep(options.schedule, numbers(options.max_pp, options.max_microbatches, options.max_vpp), count)
    print(*failures, sep="\n", end="\n" if failures else "")
    figures = {"schedules": count.schedules, "actions": count.actions, "failures": len(failures)}
    print(json.dumps({**figures, "build_s": round(count.build_s, 2), "verify_s": round(count.verify_s, 2)}))
    if count.schedules == 0:
        print("error: no schedule accepts these numbers, so nothing was proven", file=sys.stderr)
    return 1 if failures or count.schedules == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
