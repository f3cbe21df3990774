"""Print a pipeline schedule, prove it, and say how long it takes.

    python tools/draw_schedule.py --schedule interleaved-1f1b --pp 2 --num-microbatches 4 --vpp 2 --cost 1,1,1,0.1

prints each rank's order, the timeline (time downwards, one column per rank) and, as the last line, one JSON object
with makespan, span, both bubble conventions, peak activations per rank and the number of messages. Times are per chunk.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from megalite.errors import MegaliteError
from megalite.pipeline.schedules import SCHEDULES, Schedule, build_schedule, forward_only
from megalite.pipeline.simulate import CostModel, Timeline, format_table, simulate
from megalite.pipeline.verify import verify

FORWARD_ONLY = "forward-only"


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print, prove and time a pipeline schedule.")
    parser.add_argument("--schedule", default="1f1b", choices=[*SCHEDULES, FORWARD_ONLY])
    parser.add_argument("--pp", type=int, default=2, help="pipeline ranks")
    parser.add_argument("--num-microbatches", type=int, default=4, help="micro-batches per step")
    parser.add_argument("--vpp", type=int, default=1, help="model chunks per rank")
    parser.add_argument(
        "--cost",
        type=cost_model,
        default=CostModel(),
        metavar="F,I,W,latency",
        help="time of a forward, an input gradient, a weight gradient (per chunk) and a message; default 1,1,1,0",
    )
    return parser.parse_args(arguments)


def cost_model(text: str) -> CostModel:
    """Four numbers separated by commas."""
    numbers = [float(part) for part in text.split(",")]
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(numbers)} numbers; give four: F,I,W,latency")
    try:
        return CostModel(*numbers)
    except MegaliteError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def build(options: argparse.Namespace) -> Schedule:
    numbers = (options.pp, options.num_microbatches, options.vpp)
    return forward_only(*numbers) if options.schedule == FORWARD_ONLY else build_schedule(options.schedule, *numbers)


def summary(timeline: Timeline) -> dict[str, object]:
    """The last line of the output; times rounded so that 0.1 added ten times prints as 1.0."""
    return {
        "makespan": round(timeline.makespan, 9),
        "span": round(timeline.span, 9),
        "bubble_over_ideal": round(timeline.bubble_over_ideal, 9),
        "bubble_over_total": round(timeline.bubble_over_total, 9),
        "peaks": timeline.peaks,
        "peaks_at_input_grad": timeline.peaks_at_input_grad,
        "messages": timeline.messages,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        schedule = build(options)
        verify(schedule)
        timeline = simulate(schedule, options.cost)
    except MegaliteError as error:
        print(error, file=sys.stderr)
        return 2
    print(format_table(schedule), format_table(timeline), json.dumps(summary(timeline)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
