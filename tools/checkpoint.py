"""Look at checkpoints and tidy them up. DIR is a checkpoint, or a --save folder, which means its newest complete one.

    python tools/checkpoint.py inspect DIR                            what it holds, and of which run
    python tools/checkpoint.py diff A B                               which logical tensors differ, and by how much
    python tools/checkpoint.py verify DIR                             are the files and tensors what was written? (all of a folder)
    python tools/checkpoint.py average DIR --last 5 --out OUT         the mean of the last weights, as a checkpoint below OUT
    python tools/checkpoint.py prune DIR --keep-last 3 --keep-every 1000 --yes    delete the others
    python tools/checkpoint.py reshard                                says why it is not needed

Tensors are logical: `diff` and `average` do not care which layouts wrote their checkpoints. Everything runs in one process, tensor by
tensor. The last line of standard output is JSON. Exit codes: 0 done (diff: equal; verify: as written), 1 diff: different, verify: not as
written, 2 anything that could not be done.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import CheckpointError, ConfigError, MegaliteError
from megalite.log import configure_logging

if TYPE_CHECKING:
    from megalite.checkpoint.compare import Contents, Difference
    from megalite.checkpoint.manifest import Manifest

RESHARD = (
    "There is nothing to reshard: tensors are stored whole, under logical names, and every layout reads the part that it needs.\n"
    "Give --load the checkpoint and the new --tensor-model-parallel-size, --pipeline-model-parallel-size, sharding strategy or number of "
    "ranks."
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    inspect = commands.add_parser("inspect", help="what a checkpoint holds")
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--tensors", action="store_true", help="one line per tensor")
    inspect.add_argument("--values", action="store_true", help="read them: root mean square and extremes (implies --tensors)")

    diff = commands.add_parser("diff", help="which logical tensors differ")
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")
    diff.add_argument("--weights", action="store_true", help="leave optimizer state out")
    diff.add_argument("--read-all", action="store_true", help="read also what has equal hashes")
    diff.add_argument("--show", type=int, default=40, help="differences that are printed (default 40)")

    verify = commands.add_parser("verify", help="compare files and tensors with the manifest")
    verify.add_argument("directory", type=Path, metavar="DIR")
    verify.add_argument("--files-only", action="store_true", help="compare sizes and checksums of files, read no tensor")

    average = commands.add_parser("average", help="the mean of several checkpoints' weights")
    average.add_argument("checkpoints", type=Path, nargs="+", metavar="DIR", help="one --save folder with --last, or several checkpoints")
    average.add_argument("--last", type=int, help="newest complete checkpoints of the folder that are averaged")
    average.add_argument("--out", type=Path, required=True, help="folder for the result, without checkpoints")

    prune = commands.add_parser("prune", help="delete older checkpoints; without --yes only say which")
    prune.add_argument("directory", type=Path, metavar="DIR")
    prune.add_argument("--keep-last", type=int, required=True, metavar="N", help="newest complete checkpoints that stay (at least 1)")
    prune.add_argument("--keep-every", type=int, metavar="M", help="checkpoints whose step is a multiple of this stay too")
    prune.add_argument("--yes", action="store_true", help="delete")

    commands.add_parser("reshard", help="why this is not needed").add_argument("rest", nargs=argparse.REMAINDER)
    return parser


def inspect(args: argparse.Namespace) -> int:
    from megalite.checkpoint import newest_checkpoint
    from megalite.checkpoint.reading import TensorReader

    reader = TensorReader(newest_checkpoint(args.directory))
    manifest = reader.manifest
    num_weights = sum(math.prod(facts["shape"]) for name, facts in manifest.tensors.items() if name.startswith("model."))
    print(f"{reader.checkpoint}: step {manifest.step:,}, {manifest.consumed_samples:,} samples consumed")
    print(f"  {len(manifest.tensors)} tensors, {num_weights:,} weights; {len(manifest.files)} files, {_megabytes(reader.checkpoint)}")
    print(f"  written by {_layout(manifest)}; versions: {_pairs(manifest.versions)}")
    if manifest.made_of:
        print(f"  weights are the mean of {', '.join(manifest.made_of)}; no optimizer state")
    for section in ("model", "numerics"):
        values = manifest.config.get(section) or {}
        print(f"  {section}: {_pairs({name: value for name, value in values.items() if value is not None})}")
    if manifest.numerics:
        print(f"  state of numerics: {_pairs({name: value for name, value in manifest.numerics.items() if not isinstance(value, list)})}")
    if args.tensors or args.values:
        for name, facts in manifest.tensors.items():
            values = _values(reader.read(name)) if args.values else ""
            print(f"  {name:64s} {facts['dtype']:9s} {facts['shape']!s:20s} {facts.get('hash') or '(no hash)'}{values}")
    facts = {"step": manifest.step, "consumed_samples": manifest.consumed_samples, "tensors": len(manifest.tensors)}
    print(json.dumps({"checkpoint": str(reader.checkpoint), **facts, "weights": num_weights, "made_of": manifest.made_of}))
    return 0


def _values(tensor: Any) -> str:
    if tensor.numel() == 0:
        return "  empty"
    values = tensor.double()
    return f"  rms {float(values.square().mean().sqrt()):.3e}, {float(values.min()):.3e} to {float(values.max()):.3e}"


def _layout(manifest: Manifest) -> str:
    return "one process" if not manifest.layout else " x ".join(f"{name} {size}" for name, size in manifest.layout.items())


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items()) or "none"


def _megabytes(checkpoint: Path) -> str:
    return f"{sum(path.stat().st_size for path in checkpoint.iterdir() if path.is_file()) / 1e6:,.1f} MB"


def diff(args: argparse.Namespace) -> int:
    from megalite.checkpoint import newest_checkpoint
    from megalite.checkpoint.compare import differences
    from megalite.checkpoint.reading import TensorReader

    a, b = (TensorReader(newest_checkpoint(path)) for path in (args.a, args.b))
    for label, reader in (("A", a), ("B", b)):
        print(f"{label}: {reader.checkpoint}, step {reader.manifest.step}, written by {_layout(reader.manifest)}")
    found: list[Difference] = []
    for one in differences(a, b, prefix="model." if args.weights else "", trust_hashes=not args.read_all):
        found.append(one)
        if len(found) <= args.show:
            print(f"  {one.name:64s} {one.kind:8s}{one.text}{_apart(one.contents)}")
    if len(found) > args.show:
        print(f"  ... {len(found) - args.show} more (--show)")
    kinds = Counter(one.kind for one in found)
    contents = [one.contents for one in found if one.contents is not None]
    figures = {kind: kinds[kind] for kind in ("missing", "extra", "shape", "dtype", "content")}
    print(f"{len(found)} tensors differ" if found else "all tensors are equal")
    largest = {key: _finite(max((getattr(one, key) for one in contents), default=0.0)) for key in ("max_abs", "max_relative")}
    print(json.dumps({"equal": not found, **figures, **largest}))
    return 1 if found else 0


def _apart(contents: Contents | None) -> str:
    if contents is None:
        return ""
    return f"  by {contents.max_abs:.3e} (relative {contents.max_relative:.1e}), {contents.num_elements:,} elements"


def _finite(value: float) -> float | None:
    """JSON has no word for infinity."""
    return value if math.isfinite(value) else None


def verify(args: argparse.Namespace) -> int:
    from megalite.checkpoint.compare import verify_checkpoint
    from megalite.checkpoint.store import has_checkpoints, step_directories

    if not has_checkpoints(args.directory):
        raise CheckpointError(f"{args.directory} holds no checkpoint; give one, or the folder that --save was given")
    checkpoints = step_directories(args.directory) or [args.directory]
    num_bad = num_hashed = 0
    for checkpoint in checkpoints:
        verdict = verify_checkpoint(checkpoint, files_only=args.files_only)
        num_bad, num_hashed = num_bad + bool(verdict.problems), num_hashed + verdict.num_hashed
        said = f"{verdict.num_tensors} tensors, {verdict.num_hashed} of them compared with a hash"
        print(f"{checkpoint}: " + ("NOT as written" if verdict.problems else f"as written ({said})"))
        for problem in verdict.problems:
            print(f"  {problem}")
    print(json.dumps({"checkpoints": len(checkpoints), "damaged": num_bad, "hashes_compared": num_hashed}))
    return 1 if num_bad else 0


def average(args: argparse.Namespace) -> int:
    from megalite.checkpoint import complete_checkpoints, newest_checkpoint, read_manifest
    from megalite.checkpoint.edit import average_checkpoints

    if args.last is None:
        chosen = [newest_checkpoint(path) for path in args.checkpoints]
    elif len(args.checkpoints) > 1 or args.last < 2:
        raise ConfigError("--last K takes the K newest checkpoints of one folder, K at least 2; without it name every checkpoint")
    else:
        complete = complete_checkpoints(args.checkpoints[0])
        if len(complete) < args.last:
            raise ConfigError(f"{args.checkpoints[0]} holds {len(complete)} complete checkpoints, --last asks for {args.last}")
        chosen = complete[: args.last]
    written = average_checkpoints(chosen, args.out)
    made_of = read_manifest(written).made_of
    print(f"wrote {written}: the mean of {', '.join(made_of)}")
    print("it holds weights only: --load it for generation and evaluation, or train on with --load-weights-only")
    print(json.dumps({"checkpoint": str(written), "made_of": made_of}))
    return 0


def prune(args: argparse.Namespace) -> int:
    from megalite.checkpoint import complete_checkpoints, expendable
    from megalite.checkpoint import prune as delete

    wrong = [f"--{name} is {value}, at least 1 is wanted" for name, value in _counts(args) if value is not None and value < 1]
    if wrong:
        raise ConfigError(wrong)
    kept = complete_checkpoints(args.directory)
    if not kept:
        raise CheckpointError(f"{args.directory} holds no complete checkpoint; give the folder that --save was given")
    doomed = expendable(args.directory, args.keep_last, args.keep_every)
    for path in reversed(kept):
        print(f"  {path.name:16s} {_megabytes(path):>14s}  {'goes' if path in doomed else 'stays'}")
    if args.yes:
        delete(args.directory, args.keep_last, args.keep_every)
    print(f"{len(doomed)} of {len(kept)} complete checkpoints " + ("deleted" if args.yes else "would go; --yes deletes them"))
    print(json.dumps({"complete": len(kept), "expendable": [path.name for path in doomed], "deleted": bool(args.yes)}))
    return 0


def _counts(args: argparse.Namespace) -> list[tuple[str, int | None]]:
    return [("keep-last", args.keep_last), ("keep-every", args.keep_every)]


def reshard(_: argparse.Namespace) -> int:
    print(RESHARD)
    print(json.dumps({"needed": False}))
    return 0


COMMANDS = {"inspect": inspect, "diff": diff, "verify": verify, "average": average, "prune": prune, "reshard": reshard}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    configure_logging(rank=0, world_size=1)
    try:
        return COMMANDS[args.command](args)
    except (MegaliteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
