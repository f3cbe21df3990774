"""From launch to the end of the first step, on CPU ranks under torchrun: where the seconds go, and what importing costs.

    python tools/bench_startup.py              4 ranks, 3 rounds
    python tools/bench_startup.py --ranks 2 --rounds 1 --preset tiny --tp 2      other flags are those of pretrain_gpt.py

Phases of a launch, of the slowest rank, medians over rounds: until its interpreter runs (torchrun's own start), imports, rendezvous and
default process group, all that a run builds (groups of the grid, model, optimizer, data), the first step, and the second for comparison.
Beside it the same ranks with nothing but `import torch` and `init_process_group`; every round launches both, one after the other. Then the
dearest imports of `pretrain_gpt.py --help` and of a run (`python -X importtime`): own time by package, cumulative time by module.

The last line is JSON. Exits with 1 when start-up takes more than --limit times the bare launch plus the first step, or when a program
imports what it has no use for.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1.3
PHASES = ("launcher", "imports", "process group", "building", "first step")
"""In order; each begins where the one before it ends, the first at the launch."""

UNNEEDED = {
    "pretrain_gpt.py --help": ("torch", "numpy", "transformers", "tokenizers", "sentencepiece", "rich", "matplotlib"),
    "a run": ("transformers", "tokenizers", "sentencepiece", "tiktoken", "matplotlib", "tensorboard", "wandb", "pandas", "torch._dynamo",
              "torch._inductor"),
}  # fmt: skip
"""Packages that must not be imported before they are asked for."""

_BARE = """
import sys, time
started = time.time()
import torch
import torch.distributed as dist
imported = time.time()
dist.init_process_group("gloo")
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(f"{started} {imported} {time.time()}")
dist.destroy_process_group()
"""
_RUN = """
import sys, time
started = time.time()
sys.path.insert(0, sys.argv[2])
from tools.bench_startup import rank
rank(started, sys.argv[1], sys.argv[3:])
"""
_FLAGS = ("--preset", "tiny", "--mock-data", "--device", "cpu", "--train-iters", "2")


def rank(started: float, folder: str, flags: Sequence[str]) -> None:
    """One rank: what pretrain_gpt.py does up to its second step; leaves the times at which its phases ended in `folder`."""
    from megalite.cli import parse_and_validate

    config = parse_and_validate(list(flags), prog="bench_startup.py", description=__doc__ or "")
    from datetime import timedelta

    import torch

    from megalite.training import Launch, guard, run_training
    from megalite.training.launch import choose_device, init_distributed
    from megalite.training.loop import train_step
    from megalite.training.setup import build_run

    assert run_training, "a run imports all of it"
    times = [started, time.time()]
    launch = Launch.from_environment()
    with guard(launch):
        init_distributed(launch, choose_device(config.train.device, launch.local_rank), timedelta(minutes=10))
        times.append(time.time())
        run = build_run(config, launch)
        times.append(time.time())
        for _ in range(2):
            train_step(run)
            times.append(time.time())
        run.train_loader.close()
        run.metrics.close()
        assert torch.distributed.get_rank() == launch.rank
        Path(folder, str(launch.rank)).write_text(" ".join(map(str, times)), encoding="utf-8")


def launch(script: str, ranks: int, arguments: Sequence[str], timeout: float) -> list[float]:
    """Run `script` under torchrun; seconds from the launch to each time that the slowest rank left. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(script, encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(program), folder]
        began = time.time()
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=timeout, cwd=folder)
        if done.returncode != 0:
            raise RuntimeError(f"the launch ended with code {done.returncode}:\n{done.stderr[-4000:]}")
        every = [[float(word) - began for word in Path(folder, str(number)).read_text().split()] for number in range(ranks)]
    return [max(times) for times in zip(*every, strict=True)]


def phases(ends: Sequence[float]) -> dict[str, float]:
    """{phase: seconds} from the times at which they ended; a second step, where there is one, is "second step"."""
    names = (*PHASES, "second step")[: len(ends)]
    return {name: end - begin for name, begin, end in zip(names, [0.0, *ends], ends, strict=False)}


def import_times(arguments: Sequence[str]) -> list[tuple[str, int, int]]:
    """[(module, own microseconds, cumulative microseconds)] of everything that `python ARGUMENTS` imports. Raises RuntimeError."""
    done = subprocess.run([sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise RuntimeError(f"python {' '.join(arguments)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    return parse_import_times(done.stderr)


def parse_import_times(text: str) -> list[tuple[str, int, int]]:
    """What `python -X importtime` writes to stderr, other lines left out."""
    found = re.findall(r"^import time:\s+(\d+) \|\s+(\d+) \|\s*(\S+)", text, re.MULTILINE)
    return [(name, int(own), int(cumulative)) for own, cumulative, name in found]


def dearest(times: Sequence[tuple[str, int, int]], number: int = 10) -> dict[str, dict[str, float]]:
    """{"packages": {top-level package: own seconds}, "modules": {module: cumulative seconds}}, the `number` dearest of each."""
    packages: Counter[str] = Counter()
    for name, own, _ in times:
        packages[name.partition(".")[0]] += own
    modules = Counter({name: cumulative for name, _, cumulative in times})
    return {
        what: {name: round(micros / 1e6, 3) for name, micros in counter.most_common(number)}
        for what, counter in (("packages", packages), ("modules", modules))
    }


def unneeded(program: str, times: Sequence[tuple[str, int, int]]) -> list[str]:
    """Packages of `UNNEEDED` that were imported."""
    names = {name for name, _, _ in times}
    return [package for package in UNNEEDED[program] if package in names]


def measure_launches(ranks: int, rounds: int, flags: Sequence[str]) -> dict[str, Any]:
    """Medians over rounds of both launches, and of the ratios of each round."""
    ours, bare = [], []
    for number in range(rounds):
        for kind in ("bare", "run") if number % 2 == 0 else ("run", "bare"):  # a drift of the machine hits both alike
            if kind == "bare":
                bare.append(phases(launch(_BARE, ranks, (), 300)))
            else:
                ours.append(phases(launch(_RUN, ranks, [str(ROOT), *flags], 300)))
    totals = [sum(found[name] for name in PHASES) for found in ours]
    floors = [sum(least.values()) + found["first step"] for least, found in zip(bare, ours, strict=True)]
    return {
        "run": {name: round(statistics.median(found[name] for found in ours), 3) for name in (*PHASES, "second step")},
        "bare": {name: round(statistics.median(found[name] for found in bare), 3) for name in PHASES[:3]},
        "launch_to_first_step": round(statistics.median(totals), 3),
        "bare_plus_first_step": round(statistics.median(floors), 3),
        "ratio": round(statistics.median(total / floor for total, floor in zip(totals, floors, strict=True)), 3),
    }


def print_tables(found: dict[str, Any]) -> None:
    print(f"{'seconds, slowest rank':24}{'run':>10}{'bare':>10}")
    for name, seconds in found["run"].items():
        bare = found["bare"].get(name)
        print(f"{name:24}{seconds:>10.2f}{'' if bare is None else f'{bare:.2f}':>10}")
    total, floor = found["launch_to_first_step"], found["bare_plus_first_step"]
    print(f"{'launch to first step':24}{total:>10.2f}{floor:>10.2f} (bare, plus the first step)")
    for program, costs in found["imports"].items():
        print(f"\nimports of {program}: {costs['seconds']:.2f} s in all")
        for left, right in zip(costs["packages"].items(), costs["modules"].items(), strict=False):
            print(f"  {left[0]:24}{left[1]:>8.3f} own     {right[0]:44}{right[1]:>8.3f} with what it imports")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="launches of each kind (default 3)")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, help=f"accepted ratio to the bare launch plus the first step (default {LIMIT})"
    )
    options, flags = parser.parse_known_args(arguments)
    found = measure_launches(options.ranks, options.rounds, [*_FLAGS, *flags])
    commands = {"pretrain_gpt.py --help": ["pretrain_gpt.py", "--help"], "a run": ["-c", "import pretrain_gpt, megalite.training.program"]}
    found["imports"], found["unneeded"] = {}, {}
    for program, command in commands.items():
        times = import_times(command)
        found["imports"][program] = {"seconds": round(sum(own for _, own, _ in times) / 1e6, 3), **dearest(times)}
        found["unneeded"][program] = unneeded(program, times)
    print_tables(found)
    for program, packages in found["unneeded"].items():
        if packages:
            print(f"{program} imports {', '.join(packages)}, which it has no use for")
    holds = found["ratio"] <= options.limit and not any(found["unneeded"].values())
    print(json.dumps({"holds": holds, "ranks": options.ranks, **found}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
