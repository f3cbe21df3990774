"""A timeline as a list of boxes to draw, and as a Chrome trace; nothing here knows a drawing library.

Decisions:
- A box knows everything that a reader may want to see of an action: where and when it runs, how many activations its
  rank holds meanwhile, and, for a measured step, how much longer it took than predicted.
- Overlapped pairs share their time: the forward gets the upper half of the rank's lane, the backward the lower half.
- Colours tell the kind, lightness the chunk, so that a V reads as a V. Every picture uses the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.simulate import Timeline

__all__ = ["COLOURS", "FASTER", "KIND_NAMES", "SLOWER", "Box", "Panel", "boxes", "chrome_trace", "fill_of", "hex_colour"]

COLOURS: Mapping[Kind, tuple[int, int, int]] = {
    Kind.FORWARD: (91, 141, 201),
    Kind.BACKWARD: (80, 158, 110),
    Kind.INPUT_GRAD: (226, 150, 62),
    Kind.WEIGHT_GRAD: (150, 118, 178),
}
KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
}


SLOWER, FASTER = (200, 60, 50), (60, 100, 190)


@dataclass(frozen=True)
class Box:
    """One action in a picture. top, height: the part of the rank's lane that it takes, 0 to 1 from the top.

    memory: chunk activations alive on the rank while it runs. difference: measured minus predicted duration, in the
    timeline's unit; None where nothing is compared.
    """

    action: Action
    rank: int
    chunk: int
    label: str
    start: float
    end: float
    memory: int
    top: float = 0.0
    height: float = 1.0
    difference: float | None = None


@dataclass(frozen=True)
class Panel:
    """One timeline of a picture: its title, what is said with it, its boxes. by_difference: coloured by how far from predicted."""

    title: str
    caption: str
    boxes: Sequence[Box]
    num_ranks: int
    num_chunks: int
    by_difference: bool = False

    @cached_property
    def difference_scale(self) -> float:
        """Half of the mean duration: an action that takes that much longer than predicted gets the full colour."""
        return sum(box.end - box.start for box in self.boxes) / len(self.boxes) / 2


def boxes(timeline: Timeline, predicted: Timeline | None = None) -> list[Box]:
    """All actions of a timeline, rank by rank in order. predicted: what to compare the durations with."""
    schedule = timeline.schedule
    drawn = []
    for rank, order in enumerate(schedule.orders):
        alive = 0
        chunk_of = {stage: chunk for chunk, stage in enumerate(schedule.stages_of(rank))}
        for number, action in enumerate(order):
            alive += action.kind is Kind.FORWARD
            start, end = timeline.start[action], timeline.finish[action]
            top, height = _lane(timeline, order, number)
            drawn.append(
                Box(
                    action,
                    rank,
                    chunk_of[action.stage],
                    schedule.label(action),
                    start,
                    end,
                    alive,
                    top,
                    height,
                    None if predicted is None else (end - start) - (predicted.finish[action] - predicted.start[action]),
                )
            )
            alive -= action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD) if schedule.has_backward else 1
    return drawn


def _lane(timeline: Timeline, order: Sequence[Action], number: int) -> tuple[float, float]:
    action, overlapped = order[number], timeline.schedule.overlapped
    if action in overlapped and timeline.start[action] == timeline.start[order[number + 1]]:
        return 0.0, 0.5
    if number > 0 and order[number - 1] in overlapped and timeline.start[action] == timeline.start[order[number - 1]]:
        return 0.5, 0.5
    return 0.0, 1.0


def fill_of(panel: Panel, box: Box) -> str:
    """#rrggbb of a box: kind and chunk (the first chunk full, later ones lighter), or how far from predicted it was."""
    if not panel.by_difference:
        lighter = 0.55 * box.chunk / max(1, panel.num_chunks - 1)
        return hex_colour(tuple(round(part + (255 - part) * lighter) for part in COLOURS[box.action.kind]))
    scale, difference = panel.difference_scale, box.difference or 0.0
    strength = max(-1.0, min(1.0, difference / scale)) if scale > 0 else 0.0
    return hex_colour(tuple(round(255 + (part - 255) * abs(strength)) for part in (SLOWER if strength > 0 else FASTER)))


def hex_colour(parts: Sequence[int]) -> str:
    """#rrggbb of red, green and blue, 0 to 255 each."""
    return "#" + "".join(f"{part:02x}" for part in parts)


def chrome_trace(timelines: Mapping[str, Timeline], microseconds_per_unit: float = 1e6) -> str:
    """A JSON text for chrome://tracing or ui.perfetto.dev: one process per named timeline, one thread per rank.

    microseconds_per_unit: 1e6 when the timelines are in seconds. Format: Chrome's Trace Event Format, complete events.
    """
    events: list[dict[str, object]] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}})
        for rank in range(timeline.schedule.num_ranks):
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}})
        for box in boxes(timeline):
            details = {"stage": box.action.stage, "microbatch": box.action.microbatch, "activations": box.memory}
            events.append(
                {
                    "ph": "X",
                    "name": box.label,
                    "cat": KIND_NAMES[box.action.kind],
                    "pid": process,
                    "tid": box.rank,
                    "ts": round(box.start * microseconds_per_unit, 3),
                    "dur": round((box.end - box.start) * microseconds_per_unit, 3),
                    "args": details,
                }
            )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
