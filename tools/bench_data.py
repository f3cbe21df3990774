"""Speed and memory of the data path, beside megatron-core where that is installed: ratios of medians, in one run.

    pip install --no-deps --target /tmp/peer megatron-core==0.16.1
    python tools/bench_data.py --peer /tmp/peer               everything, about half an hour
    python tools/bench_data.py --peer /tmp/peer --only blends
    python tools/bench_data.py --quick                         small sizes, to see that everything runs; the figures say nothing

Sections: `sample-index`, `whole-build` (document, sample and shuffle index), `blends`, `write-index`, `start-up`,
`get-item`, `loader`, `preprocess` (tools/bench_preprocess.py). Every measurement is a process of its own
(megalite/testing/data_cases.py); a round runs ours and theirs in turn, so that drift of the machine hits both alike. The ratio
is theirs over ours: above 1, ours is faster, or smaller. Results must be equal to the last bit, else the exit code is 1,
as where a goal is missed. Without the peer its columns are empty, its goals are not judged, and the last line says so. That
line is JSON. Nothing else should run meanwhile, and the folder for the files (--folder) should be on a local disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.testing.data_cases import document_sizes, write_corpus

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("sample-index", "whole-build", "blends", "write-index", "start-up", "get-item", "loader", "preprocess")
_LONGEST, _SHORTEST_LONGEST = 999, 7  # tokens of the longest document, of usual corpora and where tokens are not the question
_TIMEOUT = 1800


@dataclass(frozen=True)
class Measurement:
    """A case with its settings; `goal` is the ratio to reach, None for figures without one."""

    name: str
    case: str
    settings: dict[str, Any]
    goal: float | None = None
    has_peer: bool = True
    is_cold: bool = False
    per: str | None = None  # report the seconds per item of this name


def measurements(section: str, quick: bool, folder: Path) -> Iterator[Measurement]:
    """What a section measures; prepares its files."""
    shrink = 500 if quick else 1
    big, medium, blend = 10_000_000 // shrink, 1_000_000 // shrink, 10_000_000 // shrink
    shared = {"longest": _LONGEST, "seq_length": 2048}
    if section == "sample-index":
        for number in (medium, big):
            for epochs in (1, 3):
                settings = shared | {"num_documents": number, "epochs": epochs}
                yield Measurement(f"sample index, {number:,} documents x {epochs}", "sample_index", settings, goal=1.0)
    elif section == "whole-build":
        settings = shared | {"prefix": corpus(folder, big, _LONGEST), "epochs": 3}
        yield Measurement(f"document, sample and shuffle index, {big:,} documents x 3", "whole_build", settings, goal=3.0)
    elif section == "blends":
        for number in (64, 256):
            settings = {"num_datasets": number, "num_samples": blend}
            yield Measurement(f"weighted blend of {number}, {blend:,} samples", "weighted_blend", settings, goal=5.0)
            yield Measurement(f"exhaustive blend of {number}, {blend:,} samples", "exhaustive_blend", settings, goal=5.0)
    elif section == "write-index":
        settings = {"prefix": corpus(folder, big, _SHORTEST_LONGEST)}
        yield Measurement(f"append {big:,} documents and write their index", "write_index", settings, goal=5.0)
    elif section == "start-up":
        settings = shared | {"prefix": corpus(folder, big, _LONGEST), "epochs": 3}
        yield Measurement(f"start with an empty cache, {big:,} documents x 3", "start_up", settings, is_cold=True)
        yield Measurement(f"start with a filled cache, {big:,} documents x 3", "start_up", settings)
    elif section in ("get-item", "loader"):
        number = 200_000 // min(shrink, 100)
        items = number * _LONGEST // 2 // 2048 - 10
        settings = shared | {
            "prefix": corpus(folder, number, _LONGEST),
            "epochs": 1,
            "cache": "",
            "items": items,
            "repeats": items // 64 * 64,
        }
        if section == "get-item":
            yield Measurement("one sample of 2,048 tokens", "get_item", settings, per="repeats")
        else:
            for workers in (0, 1, 2):
                name = f"loader, one sample, {workers} threads ahead"
                yield Measurement(name, "loader", settings | {"num_workers": workers}, has_peer=False, per="repeats")


def corpus(folder: Path, num_documents: int, longest: int) -> str:
    """A dataset in `folder`, written once."""
    prefix = folder / f"corpus-{num_documents}-{longest}"
    if not prefix.with_suffix(".bin").exists():
        write_corpus(prefix, document_sizes(num_documents, longest))
    return str(prefix)


def run_case(measurement: Measurement, side: str, settings: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a process of its own. Exits where it fails."""
    command = [sys.executable, "-m", "megalite.testing.data_cases", measurement.case, side, json.dumps(settings)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
    if done.returncode:
        sys.exit(f"{measurement.name}, {side}: exit code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(measurement: Measurement, peer: str | None, rounds: int, folder: Path) -> dict[str, Any]:
    """Medians of both sides over the rounds, their ratios, and whether the results are equal."""
    sides = ["ours", "peer"] if peer is not None and measurement.has_peer else ["ours"]
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides:
            settings = {"cache": "", "peer": peer} | measurement.settings
            if measurement.case == "start_up":
                settings["cache"] = str(folder / (f"cache-{side}-{number}" if measurement.is_cold else f"cache-{side}-0"))
            found[side].append(run_case(measurement, side, settings))
    divisor = measurement.settings[measurement.per] if measurement.per else 1
    result: dict[str, Any] = {"name": measurement.name, "goal": measurement.goal}
    for side, runs in found.items():
        result[f"{side}_seconds"] = statistics.median(run["seconds"] for run in runs) / divisor
        result[f"{side}_peak_mib"] = statistics.median(run["peak_mib"] for run in runs)
    result["is_equal"] = len({run["checksum"] for runs in found.values() for run in runs}) == 1
    if "peer" in found:
        result["ratio"] = result["peer_seconds"] / result["ours_seconds"]
        result["memory_ratio"] = result["peer_peak_mib"] / max(result["ours_peak_mib"], 0.1)
    return result


def missed(result: dict[str, Any], is_quick: bool) -> list[str]:
    """What does not hold, as sentences; goals are not judged at quick sizes."""
    found = [] if result["is_equal"] else [f"{result['name']}: the results differ"]
    if result["goal"] is not None and "ratio" in result and not is_quick and result["ratio"] < result["goal"]:
        found.append(f"{result['name']}: ratio {result['ratio']:.2f}, the goal is {result['goal']:g}")
    return found


def run_preprocess(quick: bool) -> tuple[dict[str, Any], list[str]]:
    """The section of tools/bench_preprocess.py: its figures, and whether it met its goals."""
    program = ROOT / "tools" / "bench_preprocess.py"
    if not program.exists():
        print("preprocess: tools/bench_preprocess.py is missing; left out")
        return {"left_out": "tools/bench_preprocess.py is missing"}, []
    command = [sys.executable, str(program), *(["--megabytes", "1", "--pairs", "1"] if quick else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT)
    sys.stdout.write(done.stdout)
    try:
        figures = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return {}, [f"preprocess: exit code {done.returncode}: {done.stderr[-500:]}"]
    differs = any(isinstance(part, dict) and part.get("same_output") is False for part in figures.values())
    return figures, [f"preprocess: exit code {done.returncode}"] if differs or (done.returncode and not quick) else []


def show(result: dict[str, Any]) -> None:
    """One row."""

    def text(key: str, form: str) -> str:
        return format(result[key], form) if key in result else "-"

    goal = "-" if result["goal"] is None else f"{result['goal']:g}"
    seconds = [f"{result[key]:.4g}" if key in result else "-" for key in ("ours_seconds", "peer_seconds")]
    memory = [text("ours_peak_mib", ".0f"), text("peer_peak_mib", ".0f")]
    equal = ("equal" if result["is_equal"] else "DIFFERENT") if "ratio" in result else "-"
    row = [*seconds, text("ratio", ".2f"), goal, *memory, equal]
    print(
        f"{result['name']:62s}" + "".join(f" {cell:>{width}}" for cell, width in zip(row, (10, 10, 7, 5, 8, 8, 9), strict=True)), flush=True
    )


def has_peer(folder: str | None) -> bool:
    """Whether the compiled helpers of megatron-core are below the folder."""
    return folder is not None and any(Path(folder, "megatron", "core", "datasets").glob("helpers_cpp*.so"))


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 where a goal is missed or a result differs, 2 for a peer that is not there."""
    parser = argparse.ArgumentParser(prog="bench_data.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="SECTION", help=f"of {' '.join(SECTIONS)}")
    parser.add_argument("--peer", help="folder that megatron-core was installed into; not set: no comparison")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side (default 3)")
    parser.add_argument("--quick", action="store_true", help="small sizes and one round; goals are not judged")
    parser.add_argument("--folder", help="folder for the files, 3 GB; not set: a temporary one")
    arguments = parser.parse_args(argv)
    if arguments.peer is not None and not has_peer(arguments.peer):
        sys.stderr.write(
            f"error: {arguments.peer} has no megatron/core/datasets/helpers_cpp*.so: install megatron-core there, see --help\n"
        )
        return 2
    results, problems, summary = [], [], {}
    print(f"{'':62s} {'ours s':>10} {'peer s':>10} {'ratio':>7} {'goal':>5} {'ours MiB':>8} {'peer MiB':>8}")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for section in arguments.only:
            if section == "preprocess":
                summary["preprocess"], found = run_preprocess(arguments.quick)
                problems += found
                continue
            for measurement in measurements(section, arguments.quick, Path(folder)):
                result = measure(measurement, arguments.peer, 1 if arguments.quick else arguments.rounds, Path(folder))
                show(result)
                results.append(result)
                problems += missed(result, arguments.quick)
    for problem in problems:
        print(f"missed: {problem}")
    if arguments.peer is None:
        print("megatron-core was not given (--peer): nothing was compared and its goals were not judged")
    print(json.dumps({"results": results, **summary, "peer": arguments.peer is not None, "missed": problems}))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
