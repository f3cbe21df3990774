"""Time and peak memory of conversions: Hugging Face to megalite, back, to Megatron, and from it.

    python tools/bench_convert.py                                  # a model of random weights in the shape of SmolLM2-135M
    python tools/bench_convert.py --input SmolLM2-135M             # a Hugging Face folder

Every conversion runs in a process of its own, whose largest resident memory is taken. Prints a table and one JSON line; exits with 1 when
a conversion needs more than twice the largest tensor plus 300 MB (the program itself needs about 280 MB of them), or when the weights that
come back are not those that went in.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.errors import MegaliteError

ALLOWED_BYTES = 300 * 10**6
ROOT = Path(__file__).parents[1]
PROGRAM = "import resource, sys; from tools.convert_checkpoint import main; code = main(sys.argv[1:]); "
PROGRAM += "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); sys.exit(code)"


def make_model(preset: str, folder: Path) -> None:
    """A Hugging Face folder of random weights."""
    import torch

    from megalite.config import RunConfig
    from megalite.convert.hf_config import model_to_hf
    from megalite.convert.hf_export import plan_tensors
    from megalite.convert.hf_files import write_shards
    from megalite.presets import apply_preset

    model = apply_preset(RunConfig(), preset).model
    config = model_to_hf(model)
    _, shapes = plan_tensors(model, config["model_type"])
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    write_shards(folder, shapes, lambda name: torch.randn(shapes[name], generator=generator) * 0.02, torch.float32, 2 * 10**9)
    (folder / "config.json").write_text(json.dumps(config))


def largest_tensor(folder: Path) -> int:
    """Bytes in fp32 of the largest tensor of a checkpoint of megalite."""
    from megalite.checkpoint import read_manifest

    shapes = [facts["shape"] for facts in read_manifest(folder / "step-0000000").tensors.values()]
    return 4 * max(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in shapes)


def tensors_of(folder: Path) -> dict[str, Any]:
    from megalite.checkpoint import read_manifest

    return read_manifest(folder / "step-0000000").tensors


def measure(source: str, target: str, given: Path, out: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, "-c", PROGRAM, "--from", source, "--to", target, "--input", str(given), "--output", str(out), *more]
    begin = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    found = re.search(r"^peak (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise MegaliteError(f"{source} to {target} failed: {done.stderr.strip()}")
    unit = 1 if sys.platform == "darwin" else 1024
    return {"from": source, "to": target, "seconds": round(seconds, 2), "peak_bytes": int(found[1]) * unit}


def run(given: Path, work: Path) -> dict[str, Any]:
    vocabulary = str(json.loads((given / "config.json").read_text())["vocab_size"])
    rows = [
        measure("hf", "megalite", given, work / "ours"),
        measure("megalite", "hf", work / "ours", work / "hf"),
        measure("hf", "megalite", work / "hf", work / "again"),
        measure("megalite", "megatron", work / "ours", work / "megatron"),
        measure("megatron", "megalite", work / "megatron", work / "back", "--vocab-size", vocabulary),
    ]
    largest = largest_tensor(work / "ours")
    limit = 2 * largest + ALLOWED_BYTES
    return {
        "conversions": rows,
        "largest_tensor_bytes": largest,
        "limit_bytes": limit,
        "is_within_limit": all(row["peak_bytes"] <= limit for row in rows),
        "is_equal": tensors_of(work / "ours") == tensors_of(work / "again") == tensors_of(work / "back"),
    }


def show(figures: dict[str, Any]) -> None:
    for row in figures["conversions"]:
        print(f"{row['from']:>9} to {row['to']:<9} {row['seconds']:7.2f} s   peak {row['peak_bytes'] / 1e6:7.0f} MB")
    limit, largest = figures["limit_bytes"] / 1e6, figures["largest_tensor_bytes"] / 1e6
    print(f"largest tensor {largest:.0f} MB, so at most {limit:.0f} MB: {'holds' if figures['is_within_limit'] else 'EXCEEDED'}")
    print(f"weights that come back: {'equal' if figures['is_equal'] else 'DIFFERENT'}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--input", type=Path, help="a Hugging Face folder (default: random weights of --preset)")
    parser.add_argument("--preset", default="smollm2-135m", help="shape of random weights (default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as temporary:
            given = options.input
            if given is None:
                given = Path(temporary) / "given"
                make_model(options.preset, given)
            figures = run(given.resolve(), Path(temporary))
    except (MegaliteError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    show(figures)
    print(json.dumps(figures))
    return 0 if figures["is_within_limit"] and figures["is_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
