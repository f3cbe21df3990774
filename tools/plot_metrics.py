"""Draw training and validation loss of one or more runs.

    python tools/plot_metrics.py runs/a runs/b/metrics.jsonl --output loss.png --text

--output draws the losses (every step light, smoothed strong; validation dashed) and the learning rate below them;
--text draws them in the terminal. The last line of standard output is one JSON object. Where a step was recorded more
than once (a run that was resumed from an earlier step), its last record counts. Failures print one `error:` line and
exit with 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megalite.errors import DataError, MegaliteError

FORMATS = (".png", ".svg", ".pdf")
DEFAULT_NAME = "metrics.jsonl"
BLOCKS = " ▁▂▃▄▅▆▇█"

Series = dict[int, float]


@dataclass
class History:
    """What one run recorded, by step in ascending order."""

    name: str
    loss: Series = field(default_factory=dict)
    valid_loss: Series = field(default_factory=dict)
    lr: Series = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Final numbers; a loss that is missing or not finite is None, because JSON has no word for it."""
        return {
            "run": self.name,
            "steps": max([*self.loss, *self.valid_loss]),
            "train_loss": _finite(list(self.loss.values())[-1:]),
            "valid_loss": _finite(list(self.valid_loss.values())[-1:]),
            "best_valid_loss": _finite(sorted(v for v in self.valid_loss.values() if math.isfinite(v))[:1]),
        }


def _finite(values: list[float]) -> float | None:
    return values[0] if values and math.isfinite(values[0]) else None


def read_history(path: Path, name: str) -> History:
    """Raises DataError for a file that cannot be read, holds a broken line, or records no loss."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    history = History(name)
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line.endswith("\n"):
            break  # the run is writing this line now
        if line.strip():
            _add(history, line, f"{path}:{number}")
    if not history.loss and not history.valid_loss:
        raise DataError(f"{path} records no loss; give the metrics.jsonl of a run that has made a step")
    for key in ("loss", "valid_loss", "lr"):
        setattr(history, key, dict(sorted(getattr(history, key).items())))
    return history


def _add(history: History, line: str, where: str) -> None:
    try:
        record = json.loads(line)
        step = record["step"]
        values = {key: float(record[key]) for key in ("loss", "valid_loss", "lr") if key in record}
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is no record of a step: {error!r}") from error
    if type(step) is not int:
        raise DataError(f"{where}: step {step!r} is no whole number")
    for key, value in values.items():
        getattr(history, key)[step] = value


def run_names(paths: Sequence[Path]) -> list[str]:
    """Short names: the folder of a metrics.jsonl, the stem of another file; whole paths where those are equal."""
    names = [path.absolute().parent.name if path.name == DEFAULT_NAME else path.stem for path in paths]
    return names if len(set(names)) == len(names) else [str(path.parent if path.name == DEFAULT_NAME else path) for path in paths]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over about `window` neighbours. As many before as after, so that the steep start is not shifted; at the
    flat end those after run out. Passes over nan and inf."""
    result = []
    for place in range(len(values)):
        reach = min(window // 2, place)
        finite = [value for value in values[place - reach : place + reach + 1] if math.isfinite(value)]
        result.append(sum(finite) / len(finite) if finite else math.nan)
    return result


def draw(histories: Sequence[History], window: int | None, output: Path) -> None:
    """Write the picture; its suffix decides the format."""
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it announces that it builds its font cache, once
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    loss_axes, lr_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for number, history in enumerate(histories):
        color, label = f"C{number % 10}", f"{history.name}: " if len(histories) > 1 else ""
        steps, losses = list(history.loss), list(history.loss.values())
        if steps:
            average = smoothed(losses, window or default_window(len(steps)))
            loss_axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
            loss_axes.plot(steps, average, color=color, linewidth=1.6, label=f"{label}training")
        if history.valid_loss:
            points = (list(history.valid_loss), list(history.valid_loss.values()))
            style = {"linestyle": "--", "marker": "o", "markersize": 4, "markeredgecolor": "black"}
            loss_axes.plot(*points, color=color, label=f"{label}validation", **style)
        lr_axes.plot(list(history.lr), list(history.lr.values()), color=color, linewidth=1.2)
    loss_axes.set_ylabel("loss per token")
    loss_axes.legend(frameon=False)
    lr_axes.set(xlabel="step", ylabel="learning rate")
    for axes in (loss_axes, lr_axes):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None)


def default_window(num_steps: int) -> int:
    return max(1, min(50, num_steps // 25))


def text_curve(series: Series, *, width: int = 64, height: int = 8) -> str:
    """A curve of block characters: each column is the mean of its share of the steps, the lowest one is the floor."""
    points = [(step, value) for step, value in series.items() if math.isfinite(value)]
    if not points:
        return "(nothing finite)"
    width = min(width, len(points))
    columns = [points[len(points) * i // width : len(points) * (i + 1) // width] for i in range(width)]
    means = [sum(value for _, value in column) / len(column) for column in columns]
    low, high = min(means), max(means)
    eighths = [1 + round((8 * height - 1) * (mean - low) / ((high - low) or 1)) for mean in means]
    rows = ["".join(BLOCKS[min(8, max(0, count - 8 * row))] for count in eighths) for row in reversed(range(height))]
    first, last = points[0][0], points[-1][0]
    if height == 1:
        return f"{means[0]:.3f} {rows[0]} {means[-1]:.3f} (steps {first} to {last})"
    labels = [f"{high:.3f}", *[""] * (height - 2), f"{low:.3f}"]
    lines = [f"{label:>9} │{row}" for label, row in zip(labels, rows, strict=True)]
    ends = f"{first}{last:>{max(width - len(str(first)), len(str(last)) + 1)}}"
    return "\n".join([*lines, f"{'':9} └{'─' * width}", f"{'step':>9}  {ends}"])


def text_report(history: History) -> str:
    """The curves of one run for a terminal."""
    parts = [f"{history.name}: training loss\n{text_curve(history.loss)}"] if history.loss else []
    if history.valid_loss:
        parts.append(f"{history.name}: validation loss {text_curve(history.valid_loss, height=1)}")
    return "\n\n".join(parts)


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="metrics.jsonl of a run")
    parser.add_argument("--output", type=Path, metavar="PICTURE", help=f"picture to write ({' '.join(FORMATS)})")
    parser.add_argument("--text", action="store_true", help="draw the curves in the terminal")
    parser.add_argument("--smooth", type=int, metavar="N", help="steps to average over (default: 1/25 of them, at most 50)")
    return parser


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Draw what was asked for; returns the summary. Raises MegaliteError subclasses and OSError."""
    if args.output is not None and args.output.suffix not in FORMATS:
        raise DataError(f"cannot draw {args.output}: its name must end in one of {' '.join(FORMATS)}")
    if args.smooth is not None and args.smooth < 1:
        raise DataError(f"--smooth is {args.smooth}; it must be at least 1 (no smoothing)")
    files = [path / DEFAULT_NAME if path.is_dir() else path for path in args.files]
    histories = [read_history(path, name) for path, name in zip(files, run_names(files), strict=True)]
    if args.output is not None:
        draw(histories, args.smooth, args.output)
    if args.text:
        print("\n\n".join(text_report(history) for history in histories), end="\n\n")
    output = None if args.output is None else str(args.output)
    return {"runs": [history.summary() for history in histories], "output": output}


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    try:
        summary = run(args)
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
