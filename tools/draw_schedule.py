"""Draw a pipeline schedule, prove it, and say how long it takes.

    python tools/draw_schedule.py --schedule interleaved-1f1b --pp 2 --num-microbatches 4 --vpp 2 --cost 1,1,1,0.1
    python tools/draw_schedule.py --schedule 1f1b zb-v --pp 4 --num-microbatches 8 --output docs/schedules.svg
    python tools/draw_schedule.py --trace run.jsonl --output step.html --chrome step.json

The first prints each rank's order, the timeline (time downwards, one column per rank) and, as the last line, one JSON
object with makespan, span, bubbles, peak activations per rank and the number of messages; --json prints that line only.

--schedule takes names, files (x.csv, x.json) and functions (my_schedule.py:function). With several schedules the costs
are those of all model chunks of a rank together, so that every schedule does the same work; with one they are per chunk.
--output draws: .svg, .png or .pdf, or .html with the details of an action under the pointer. --chrome writes a trace
for ui.perfetto.dev. --trace compares a measured step with its prediction (see megalite/pipeline/measured.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.errors import ConfigError, MegaliteError
from megalite.pipeline.measured import compare
from megalite.pipeline.picture import COLOURS, FASTER, KIND_NAMES, SLOWER, Panel, boxes, chrome_trace, fill_of, hex_colour
from megalite.pipeline.picture_html import html_page
from megalite.pipeline.picture_svg import svg_picture
from megalite.pipeline.schedules import (
    SCHEDULES,
    Schedule,
    ScheduleOptions,
    build_schedule,
    forward_only,
    schedule_violations,
    write_schedule,
)
from megalite.pipeline.simulate import CostModel, Timeline, format_table, simulate
from megalite.pipeline.verify import verify

FORWARD_ONLY = "forward-only"
FORMATS = (".svg", ".png", ".pdf", ".html")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Draw, prove and time pipeline schedules.")
    names = f"one or more of {', '.join(SCHEDULES)}, {FORWARD_ONLY}, x.csv, x.json, x.py:function"
    parser.add_argument("--schedule", nargs="+", default=["1f1b"], metavar="NAME", help=names)
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--num-microbatches", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--vpp", type=int, help="model chunks per rank; by default 1, or 2 where a schedule needs two")
    parser.add_argument("--microbatch-group-size-per-virtual-pipeline-stage", type=int, dest="group_size", help="of interleaved-1f1b")
    parser.add_argument(
        "--cost",
        type=cost_model,
        default=CostModel(),
        metavar="F,I,W,latency",
        help="time of a forward, an input gradient, a weight gradient and a message; each of the first three may be a "
        "list with one number per stage, 1:1:2; default 1,1,1,0",
    )
    parser.add_argument("--overlapped-pair", type=float, help="time of a forward and backward that run as one block (dualpipe-v)")
    parser.add_argument("--message-bytes", type=float, default=0.0, help="bytes of one message, on top of the latency")
    parser.add_argument("--bandwidth", type=float, default=float("inf"), help="bytes per unit of time between two ranks")
    parser.add_argument("--no-overlap-communication", action="store_true", help="the sending rank waits until its message has arrived")
    parser.add_argument("--json", action="store_true", help="print the JSON line only")
    parser.add_argument("--output", type=Path, help=f"picture to write: {', '.join(FORMATS)}")
    parser.add_argument("--chrome", type=Path, help="trace to write for chrome://tracing or ui.perfetto.dev")
    parser.add_argument("--csv", type=Path, help="table of the orders to write, which --schedule reads back")
    parser.add_argument("--trace", type=Path, help="measured trace (JSON lines) to compare with its prediction")
    parser.add_argument("--step", type=int, help="step of the trace; by default the last complete one")
    return parser.parse_args(arguments)


def cost_model(text: str) -> CostModel:
    """Four numbers separated by commas, the first three perhaps lists separated by colons."""
    parts = text.split(",")
    if len(parts) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(parts)} numbers; give four: F,I,W,latency")
    costs = [tuple(map(float, part.split(":"))) if ":" in part else float(part) for part in parts[:3]]
    try:
        return CostModel(*costs, latency=float(parts[3]))
    except MegaliteError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def simulate_all(options: argparse.Namespace) -> dict[str, Timeline]:
    """One proven and simulated timeline per schedule, by the title it gets. Raises MegaliteError."""
    cost = replace(
        options.cost,
        overlapped_pair=options.overlapped_pair,
        message_bytes=options.message_bytes,
        bandwidth=options.bandwidth,
        overlap_communication=not options.no_overlap_communication,
    )
    timelines = {}
    for name in options.schedule:
        chunks = options.vpp if options.vpp is not None else default_chunks(name, options)
        chunk_cost = _per_chunk(cost, chunks) if len(options.schedule) > 1 else cost
        schedule = build(name, chunks, options, chunk_cost)
        verify(schedule)
        timelines[schedule.name] = simulate(schedule, chunk_cost)
    return timelines


def default_chunks(name: str, options: argparse.Namespace) -> int:
    """The smallest of 1, 2, 3 and 4 chunks that the schedule accepts."""
    if name == FORWARD_ONLY:
        return 1
    return next((v for v in (1, 2, 3, 4) if not schedule_violations(name, options.pp, options.num_microbatches, v)), 1)


def build(name: str, chunks: int, options: argparse.Namespace, cost: CostModel) -> Schedule:
    numbers = (options.pp, options.num_microbatches, chunks)
    if name == FORWARD_ONLY:
        return forward_only(*numbers)
    return build_schedule(name, *numbers, ScheduleOptions(group_size=options.group_size, cost=cost))


def _per_chunk(cost: CostModel, chunks: int) -> CostModel:
    values = (cost.forward, cost.input_grad, cost.weight_grad)
    if any(isinstance(value, tuple) for value in values):
        raise ConfigError("several schedules have several numbers of stages: give one number for F, I and W each, not a list")
    pair = None if cost.overlapped_pair is None else cost.overlapped_pair / chunks
    forward, input_grad, weight_grad = (float(value) / chunks for value in values if not isinstance(value, tuple))
    return replace(cost, forward=forward, input_grad=input_grad, weight_grad=weight_grad, overlapped_pair=pair)


def summary(timeline: Timeline) -> dict[str, Any]:
    """The figures of one timeline; times rounded so that 0.1 added ten times prints as 1.0."""
    return {
        "schedule": timeline.schedule.name,
        "makespan": round(timeline.makespan, 9),
        "span": round(timeline.span, 9),
        "bubble": round(timeline.bubble_over_total, 9),
        "bubble_over_ideal": round(timeline.bubble_over_ideal, 9),
        "bubble_over_total": round(timeline.bubble_over_total, 9),
        "peaks": timeline.peaks,
        "peaks_at_input_grad": timeline.peaks_at_input_grad,
        "messages": timeline.messages,
    }


# ---- pictures --------------------------------------------------------------------------------------------------------


def caption(timeline: Timeline) -> str:
    schedule = timeline.schedule
    peak = max(timeline.peaks) / schedule.num_chunks
    return (
        f"span {timeline.span:.4g}, bubble {timeline.bubble_over_total:.1%} of it, "
        f"at most {peak:.3g} micro-batches of activations per rank, {timeline.messages} messages"
    )


def panels_of(timelines: dict[str, Timeline]) -> list[Panel]:
    return [
        Panel(name, caption(timeline), boxes(timeline), timeline.schedule.num_ranks, timeline.schedule.num_chunks)
        for name, timeline in timelines.items()
    ]


def write_picture(path: Path, panels: Sequence[Panel], unit: str) -> None:
    """Raises ConfigError for an unknown format, or a folder that cannot be written."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} is no picture that can be written: end it in {', '.join(FORMATS)}")
    if path.suffix == ".html":
        write_text(path, html_page(", ".join(panel.title for panel in panels), panels, unit))
    elif path.suffix == ".svg":
        write_text(path, svg_picture(panels, unit))
    else:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draw_figure(path, panels, unit)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error}") from error


def write_text(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error


def draw_figure(path: Path, panels: Sequence[Panel], unit: str) -> None:
    """PNG or PDF: one axes per panel on one time scale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    end = max(box.end for panel in panels for box in panel.boxes)
    heights = [panel.num_ranks for panel in panels]
    size = (11, sum(0.36 * number + 0.75 for number in heights))
    with plt.rc_context({"font.size": 9}):
        figure, axes = plt.subplots(len(panels), 1, sharex=True, squeeze=False, figsize=size, height_ratios=heights)
        for axis, panel in zip(axes[:, 0], panels, strict=True):
            _draw_panel(axis, panel, end)
        axes[-1, 0].set_xlabel(f"time in {unit.strip()}" if unit else "time")
        figure.legend(handles=_legend(panels), loc="upper right", ncols=6, frameon=False, handlelength=1, columnspacing=1.2)
        figure.tight_layout(rect=(0, 0, 1, 0.95))
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_panel(axis: Any, panel: Panel, end: float) -> None:
    edge = "#999" if panel.by_difference else "white"
    for rank in range(panel.num_ranks):
        axis.axhspan(rank + 0.06, rank + 0.94, color="#f2f2f2", linewidth=0)
    for box in panel.boxes:
        width, top, height = box.end - box.start, box.rank + 0.06 + 0.88 * box.top, 0.88 * box.height
        axis.broken_barh([(box.start, width)], (top, height), facecolor=fill_of(panel, box), edgecolor=edge, linewidth=0.4)
        text = str(box.action.microbatch)
        if width > len(text) * end / 120:
            size = 7 if box.height == 1 else 4
            axis.text(box.start + width / 2, top + height / 2, text, ha="center", va="center_baseline", fontsize=size)
    axis.set(xlim=(0, end), ylim=(panel.num_ranks, 0))
    axis.set_yticks([rank + 0.5 for rank in range(panel.num_ranks)], [f"rank {rank}" for rank in range(panel.num_ranks)])
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.set_title(f"{panel.title}: {panel.caption}", loc="left", fontsize=9)


def _legend(panels: Sequence[Panel]) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = {box.action.kind for panel in panels for box in panel.boxes}
    patches = [Patch(color=hex_colour(COLOURS[kind]), label=KIND_NAMES[kind]) for kind in COLOURS if kind in kinds]
    if any(panel.by_difference for panel in panels):
        patches += [Patch(color=hex_colour(SLOWER), label="slower than predicted"), Patch(color=hex_colour(FASTER), label="faster")]
    return patches


# ---- programs --------------------------------------------------------------------------------------------------------


def run_trace(options: argparse.Namespace) -> dict[str, Any]:
    """Compare a measured step with its prediction; returns the JSON line."""
    found = compare(options.trace, options.step)
    measured, predicted = found.measured, found.predicted
    if options.output:
        shape = (measured.schedule.num_ranks, measured.schedule.num_chunks)
        text = f"span {measured.span:.4g}, bubble {found.measured_bubble:.1%} of it"
        upper = Panel(f"{predicted.schedule.name}, predicted", caption(predicted), boxes(predicted), *shape)
        lower = Panel(f"step {found.step}, measured", text, boxes(measured, predicted), *shape, by_difference=True)
        write_picture(options.output, [upper, lower], " s")
    if options.chrome:
        write_text(options.chrome, chrome_trace({"predicted": predicted, "measured": measured}))
    if not options.json:
        print(f"{'':12s} {'makespan s':>12s} {'span s':>12s} {'bubble':>8s}")
        for name, timeline, bubble in (
            ("predicted", predicted, predicted.bubble_over_total),
            ("measured", measured, found.measured_bubble),
        ):
            print(f"{name:12s} {timeline.makespan:12.6f} {timeline.span:12.6f} {bubble:8.1%}")
    figures = {"makespan": round(measured.makespan, 9), "span": round(measured.span, 9), "bubble": round(found.measured_bubble, 9)}
    return {**summary(predicted), "step": found.step, "measured": figures}


def run_schedules(options: argparse.Namespace) -> dict[str, Any]:
    """Print, draw and write the schedules; returns the JSON line."""
    timelines = simulate_all(options)
    if options.output:
        write_picture(options.output, panels_of(timelines), "")
    if options.chrome:
        write_text(options.chrome, chrome_trace(timelines, microseconds_per_unit=1e3))
    if options.csv:
        write_text(options.csv, write_schedule(next(iter(timelines.values())).schedule))
    if not options.json:
        for timeline in timelines.values():
            print(format_table(timeline.schedule), format_table(timeline), sep="\n\n", end="\n\n")
    figures = [summary(timeline) for timeline in timelines.values()]
    return figures[0] if len(figures) == 1 else {**figures[0], "others": figures[1:]}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        figures = run_trace(options) if options.trace else run_schedules(options)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
