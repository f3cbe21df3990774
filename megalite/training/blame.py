"""Whom the ranks of a run that stands still are waiting for: a decision about what each rank has said of itself. Pure.

In this order
1. Ranks whose process says nothing any more: stopped, dead, cut off, or inside native code that never lets go of the interpreter.
2. A rank that waits for nobody. Of several the one with the fewest steps, then the one that has been quiet for longest.
3. All wait: the one with the fewest steps, then the one that has been quiet for longest. This is a guess, and is called one.

Whether a rank waits is told by where its main thread stands: in a collective, or in waiting for its device (`own_time.is_waiting`). On
GPUs the host of a rank whose device waits for another one waits too, so it does not come under 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

__all__ = ["Blame", "Entry", "blame", "table"]

MOST_LINES = 16


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a rank says of itself. step: steps made; doing: its action; comm: its last collective; where: of its main thread.

    quiet_s: seconds without progress; limit_s: how many are too many; both by its own clock. beat: changes every time.
    """

    host: str
    step: int
    doing: str
    comm: str
    where: str
    is_waiting: bool
    quiet_s: float
    limit_s: float
    is_finished: bool = False
    beat: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, raw: bytes | str) -> Entry:
        return cls(**json.loads(raw))


@dataclass(frozen=True)
class Blame:
    """The ranks that the others wait for, and what is known of them."""

    ranks: tuple[int, ...]
    reason: str


def blame(entries: Mapping[int, Entry | None], ages: Mapping[int, float], stale_s: float) -> Blame:
    """entries: of all ranks, None for one that has never said anything; ages: seconds since each last changed, by the reader's clock.

    stale_s: the age from which a rank counts as silent. At least one rank has not finished: the one that asks.
    """
    silent = tuple(rank for rank, entry in sorted(entries.items()) if is_silent(entry, ages[rank], stale_s))
    if silent:
        seconds = min(ages[rank] for rank in silent)
        return Blame(
            silent,
            f"{'its process has' if len(silent) == 1 else 'their processes have'} not answered for {seconds:.0f} s: stopped, dead, cut off "
            "from the network, or in native code that holds the interpreter",
        )
    running = {rank: entry for rank, entry in entries.items() if entry is not None and not entry.is_finished}
    rank = min(running, key=lambda rank: (running[rank].is_waiting, running[rank].step, -running[rank].quiet_s, rank))
    entry = running[rank]
    if not entry.is_waiting:
        return Blame((rank,), f"it waits for no other rank: {entry.doing}, at {entry.where}")
    return Blame((rank,), f"every rank waits, and this one seems to be behind: {entry.doing}, at {entry.where}")


def is_silent(entry: Entry | None, age: float, stale_s: float) -> bool:
    return age > stale_s and (entry is None or not entry.is_finished)


def table(entries: Mapping[int, Entry | None], ages: Mapping[int, float], first: tuple[int, ...]) -> str:
    """A line per rank, those of `first` in front; of a big world the first lines only."""
    order = sorted(entries, key=lambda rank: (rank not in first, rank))
    lines = [f"  rank {rank}: {_line(entries[rank], ages[rank])}" for rank in order[:MOST_LINES]]
    left = len(order) - len(lines)
    return "\n".join(lines + ([f"  and {left} more ranks"] if left else []))


def _line(entry: Entry | None, age: float) -> str:
    if entry is None:
        return "has not said anything"
    if entry.is_finished:
        return f"{entry.host}, has finished after step {entry.step}"
    state = "waits" if entry.is_waiting else "waits for nobody"
    return (
        f"{entry.host}, {entry.step} steps made, {entry.doing}, last collective {entry.comm}, {state}, at {entry.where}, no progress for "
        f"{entry.quiet_s:.0f} s, as it said {age:.0f} s ago"
    )
