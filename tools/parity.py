"""Train one model in every layout of up to N ranks on this machine's CPU and compare it with a single rank.

    python tools/parity.py --max-ranks 8                     the built-in tiny model, every layout
    python tools/parity.py --max-ranks 4 --schedule zb-h1 zb-v   the same with schedules that split backward passes
    python tools/parity.py --max-ranks 4 --config run.toml   your model (its layout settings are replaced, fp32, CPU)

Prints a row per layout and, last, one line of JSON. Exits with 1 when a layout does not train the same model, 2 on wrong settings.
Initial weights must be equal in every bit, losses within 1e-5 and gradient norms within 1e-4 (relative), weights after the last step
within 1e-4 (absolute); layouts that differ only in pp and schedule must be equal in every bit (a tied head at pp 1: 1e-6).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.config import RunConfig
from megalite.errors import MegaliteError
from megalite.pipeline.schedules import SCHEDULES
from megalite.testing.layouts import WHOLE_BACKWARD, Layout, layouts

if TYPE_CHECKING:
    from megalite.testing.parity import TrainedCase


@dataclass(frozen=True)
class Row:
    """One layout's verdict."""

    layout: str
    loss: float
    grad_norm: float
    weights: float
    bitwise: str
    failure: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-ranks", type=int, default=8, help="largest number of ranks; powers of two up to it are run")
    parser.add_argument("--config", type=Path, help="run.toml of the model and batch to check (default: a built-in tiny model)")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps (default 3)")
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 3], choices=range(4), help="ZeRO stages (default 0 3)")
    schedules = f"schedules of the layouts with pp above 1, of {', '.join(SCHEDULES)} (default {' '.join(WHOLE_BACKWARD)})"
    parser.add_argument("--schedule", nargs="+", default=WHOLE_BACKWARD, choices=SCHEDULES, metavar="NAME", help=schedules)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one layout (default 300)")
    arguments = parser.parse_args()
    try:
        rows = run_matrix(read_config(arguments.config, arguments.steps), arguments)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = [row for row in rows if row.failure]
    figures = {
        "layouts": len(rows),
        "failed": len(failed),
        "max_loss_difference": largest([row.loss for row in rows]),
        "max_grad_norm_difference": largest([row.grad_norm for row in rows]),
        "max_weight_difference": largest([row.weights for row in rows]),
    }
    print(json.dumps(figures))
    return 1 if failed else 0


def largest(differences: list[float]) -> float | None:
    """The largest one; None (JSON has no other word for it) where a layout gave none that is finite."""
    return max(differences) if all(map(math.isfinite, differences)) else None


def read_config(path: Path | None, steps: int) -> RunConfig:
    """The model and batch to check, on CPU in fp32, at a constant learning rate, on pseudo-random tokens where it names no data."""
    from megalite.testing.parity import tiny_config

    config = tiny_config()
    if path is not None:
        from megalite.cli import parse_run_config

        config = parse_run_config(["--config", str(path)], prog="parity.py", description="")
    train = replace(config.train, train_iters=steps, device="cpu", eval_interval=None)
    numerics = replace(config.numerics, precision="fp32")
    output = replace(config.output, save=None, load=None, save_interval=None, metrics_file=None, tensorboard_dir=None)
    optim = replace(config.optim, lr_decay_style="constant", lr_warmup_iters=0, lr_warmup_fraction=None)
    data = config.data if config.data.data_path else replace(config.data, mock_data=True)
    return replace(config, train=train, numerics=numerics, output=output, optim=optim, data=data)


def run_matrix(config: RunConfig, arguments: argparse.Namespace) -> list[Row]:
    """Every layout in turn; rows are printed as they come."""
    from megalite.testing.parity import problems, train_case
    from megalite.testing.rank_pool import RankError, RankPool

    sizes = [2**power for power in range(arguments.max_ranks.bit_length()) if 2**power <= arguments.max_ranks]
    rows: list[Row] = []
    references: dict[object, TrainedCase] = {}
    print(f"{'layout':44s} {'loss':>9s} {'grad norm':>9s} {'weights':>9s}  over pp and schedule   verdict")
    with RankPool(max_ranks=sizes[-1]) as pool:
        for size in sizes:
            for layout in layouts(size, zeros=tuple(arguments.zero), schedules=tuple(arguments.schedule)):
                impossible = problems(config, layout)
                if impossible:
                    print(f"{layout!s:44s} not possible: {impossible[0]}")
                    if layout == Layout(tied=layout.tied):
                        raise MegaliteError(f"the configuration does not run on one rank: {'; '.join(impossible)}")
                    continue
                begin = time.perf_counter()
                try:
                    case = pool.run(train_case, layout.world_size, config, layout, timeout=arguments.timeout)[0]
                    row = judge(layout, case, references)
                except RankError as error:
                    row = Row(str(layout), math.inf, math.inf, math.inf, "", f"failed: {error}")
                rows.append(row)
                print_row(row, time.perf_counter() - begin)
    return rows


def judge(layout: Layout, case: TrainedCase, references: dict[object, TrainedCase]) -> Row:
    """Compare with one rank, and with the first layout that does the same arithmetic."""
    from megalite.testing.parity import Tolerance, bitwise_differences, compare

    tolerance = Tolerance()
    if layout.world_size == 1:
        references["one rank", layout.tied] = case
    elif ("one rank", layout.tied) not in references:
        return Row(str(layout), math.inf, math.inf, math.inf, "", "the layout of one rank failed: there is nothing to compare with")
    difference = compare(case, references["one rank", layout.tied])
    problems = [] if difference.within(tolerance) else ["differs from one rank by more than the tolerance"]
    problems += [f"initial weights differ: {', '.join(difference.initial[:3])}"] if difference.initial else []
    # A tied head's gradient is added in another order where embedding and head share a stage.
    group = (layout.arithmetic, layout.tied and layout.pp == 1)
    twin = references.setdefault(group, case)
    bits = bitwise_differences(case, twin)
    bitwise = "first of its kind" if twin is case else "bitwise equal" if not bits else f"{len(bits)} differ"
    problems += [f"not bitwise equal over pp and schedule: {', '.join(bits[:3])}"] if bits else []
    if layout.tied and layout.pp > 1 and twin is case and (layout.arithmetic, True) in references:
        near = compare(case, references[layout.arithmetic, True])
        if max(near.loss, near.grad_norm, near.weights) > tolerance.tied:
            problems.append(f"tied head differs over pp by {max(near.loss, near.grad_norm, near.weights):.1e}")
    return Row(str(layout), difference.loss, difference.grad_norm, difference.weights, bitwise, "; ".join(problems))


def print_row(row: Row, seconds: float) -> None:
    verdict = row.failure or f"ok ({seconds:.1f} s)"
    print(f"{row.layout:44s} {row.loss:9.1e} {row.grad_norm:9.1e} {row.weights:9.1e}  {row.bitwise:22s} {verdict}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
