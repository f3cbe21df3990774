"""Compare what two runs computed in a step, whatever their layouts, and name the first tensor that differs.

    torchrun --nproc-per-node 1 pretrain_gpt.py ... --probe-dir probes/one
    torchrun --nproc-per-node 4 pretrain_gpt.py ... --tp 2 --pp 2 --probe-dir probes/four
    python tools/compare_runs.py probes/one probes/four

Both runs need the same model, data, seed and global batch size; --probe-steps chooses the steps (default: the first one). Tensors are put
together from the ranks' parts and compared in the order in which a step computes them: outputs forward, from the embedding to the loss;
gradients of the outputs, backward; gradients of parameters; updated parameters. A difference is the largest absolute one, relative to the
largest value of the tensor. In fp32, layouts agree within 1e-5 up to the gradients of the first step; Adam's first updates have the size
of the learning rate wherever a gradient's sign is noise, so later tensors agree less closely. Prints the first tensors above the
tolerance and, last, a line of JSON.

Exit code: 0 where all agree within --tolerance, 1 where not, 2 for folders that cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import DataError, MegaliteError

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("forward", "backward", "gradient", "parameter")
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Compared:
    """A tensor of both runs. absolute: the largest difference; relative: to the largest magnitude; where: the sample of it; note: what
    makes a comparison impossible."""

    kind: str
    name: str
    absolute: float
    relative: float
    where: str
    note: str = ""


class Probed:
    """The probes of one step of one run. Raises DataError for a folder without any and for a file that cannot be read."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.files = sorted(folder.glob("rank-*.safetensors"))
        if not self.files:
            raise DataError(f"{folder} holds no probes; a run writes them with --probe-dir")
        self._places: dict[str, dict[str, dict[str, Any]]] = {}
        for path in self.files:
            try:
                file = safe_open(path, framework="pt")  # stays open: its table of contents may be longer than a tensor
                keys = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
            for key in keys:
                kind, name, sample, part = key.split("/")
                self._places.setdefault(f"{kind}/{name}", {}).setdefault(sample, {})[part] = file

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def samples(self, name: str) -> list[str]:
        return sorted(self._places[name], key=lambda sample: (len(sample), sample))

    def tensor(self, name: str, sample: str) -> Tensor:
        """Put together along the sequence. Raises DataError where a part is missing."""
        import torch

        parts = self._places[name][sample]
        count = int(next(iter(parts)).partition("of")[2])
        missing = [f"{part}of{count}" for part in range(count) if f"{part}of{count}" not in parts]
        if missing:
            raise DataError(f"{self.files[0].parent}: {name} of sample {sample} lacks part {missing[0]}; is the file of a rank missing?")
        keys = [f"{part}of{count}" for part in range(count)]
        values = [parts[key].get_tensor(f"{name}/{sample}/{key}") for key in keys]
        return values[0] if count == 1 else torch.cat(values)


def in_order(names: set[str]) -> list[str]:
    """As a step computes them."""

    def key(full: str) -> tuple:
        kind, name = full.split("/")
        layer = re.match(r"layers\.(\d+)", name)
        place = int(layer[1]) if layer else (-1 if name.startswith("embedding") else sys.maxsize)
        inner = {"attention": 0, "mlp": 1}.get(name.rpartition(".")[2], 2)
        return (KINDS.index(kind), -place, -inner, name) if kind == "backward" else (KINDS.index(kind), place, inner, name)

    return sorted(names, key=key)


def compare(a: Probed, b: Probed) -> list[Compared]:
    """All tensors of either run, in the order of the computation. Raises DataError."""
    return [_compare(a, b, name) for name in in_order(a.names | b.names)]


def _compare(a: Probed, b: Probed, full: str) -> Compared:
    import torch

    kind, name = full.split("/")
    for first, second, which in ((a, b, "second"), (b, a, "first")):
        if full in first.names and full not in second.names:
            return Compared(kind, name, float("inf"), float("inf"), "", f"not in the {which} run")
    if name == "loss":
        x, y = (torch.stack([run.tensor(full, sample).double() for sample in run.samples(full)]).sum() for run in (a, b))
        return _difference(kind, name, [("all", x, y)])
    if a.samples(full) != b.samples(full):
        return Compared(kind, name, float("inf"), float("inf"), "", f"samples {_span(a.samples(full))} and {_span(b.samples(full))}")
    return _difference(kind, name, [(sample, a.tensor(full, sample), b.tensor(full, sample)) for sample in a.samples(full)])


def _difference(kind: str, name: str, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Compared:
    """A NaN or an infinity of one side only is an infinite difference."""
    from megalite.checkpoint.compare import compare_tensors

    worst, largest, where = 0.0, 0.0, ""
    for sample, x, y in pairs:
        if x.shape != y.shape:
            return Compared(kind, name, float("inf"), float("inf"), sample, f"shapes {list(x.shape)} and {list(y.shape)}")
        found = compare_tensors(x, y)
        largest = max(largest, _magnitude(x), _magnitude(y))
        if found.max_abs > worst:
            worst, where = found.max_abs, sample
    relative = worst / largest if largest > 0 else math.inf
    return Compared(kind, name, worst, relative if worst > 0 else 0.0, where)


def _magnitude(values: Tensor) -> float:
    """The largest finite one."""
    finite = values.double().abs().nan_to_num(nan=0.0, posinf=0.0)
    return float(finite.max()) if values.numel() else 0.0


def _span(samples: Sequence[str]) -> str:
    return f"{samples[0]} to {samples[-1]}"


def common_steps(a: Path, b: Path) -> list[int]:
    """Steps that both folders hold. Raises DataError where there is none."""
    found = []
    for folder in (a, b):
        if not folder.is_dir():
            raise DataError(f"{folder} is no folder; a run writes one with --probe-dir")
        found.append({int(match[1]) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))})
    if not found[0] & found[1]:
        raise DataError(f"{a} holds probes of steps {sorted(found[0])}, {b} of {sorted(found[1])}: there is no common one")
    return sorted(found[0] & found[1])


def report(compared: Sequence[Compared], tolerance: float, atol: float, most: int) -> list[Compared]:
    """Print the tensors above both tolerances, and return them."""
    different = [one for one in compared if one.note or (one.relative > tolerance and one.absolute > atol)]
    for one in different[:most]:
        figures = one.note or f"differs by {one.absolute:.3g}, {one.relative:.3g} of its largest value, at sample {one.where}"
        print(f"{one.kind:10}{one.name:44}{figures}")
    if len(different) > most:
        print(f"... and {len(different) - most} more (--all shows them)")
    return different


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("a", type=Path, metavar="A", help="--probe-dir of a run")
    parser.add_argument("b", type=Path, metavar="B", help="of another run")
    parser.add_argument(
        "--tolerance", type=float, default=1e-3, metavar="X", help="relative difference that is noise (default: %(default)s)"
    )
    parser.add_argument(
        "--atol", type=float, default=0.0, metavar="X", help="absolute difference that is noise, for tensors that are 0 but for rounding"
    )
    parser.add_argument("--all", action="store_true", help="show all tensors that differ, not the first ten")
    options = parser.parse_args(arguments)
    figures: dict[str, object] = {"equal": 0, "within_tolerance": 0, "different": 0, "first": None}
    try:
        for step in common_steps(options.a, options.b):
            compared = compare(*(Probed(folder / f"step-{step:07d}") for folder in (options.a, options.b)))
            print(f"step {step}: {len(compared)} tensors")
            different = report(compared, options.tolerance, options.atol, sys.maxsize if options.all else 10)
            equal = sum(one.absolute == 0 for one in compared)
            for key, value in (("equal", equal), ("different", len(different))):
                figures[key] = int(str(figures[key])) + value
            figures["within_tolerance"] = int(str(figures["within_tolerance"])) + len(compared) - equal - len(different)
            if different and figures["first"] is None:
                figures["first"] = f"{different[0].kind} {different[0].name} in step {step}"
    except MegaliteError as error:
        print("error:", error, file=sys.stderr)
        return 2
    print(json.dumps(figures))
    return 0 if figures["first"] is None else 1


if __name__ == "__main__":
    sys.exit(main())
