"""Saving and loading a checkpoint against bare torch.distributed.checkpoint and torch.save, on one rank of this machine's CPU.

    python tools/bench_checkpoint.py                  200 MB of weights, 600 MB with Adam's moments; 5 rounds
    python tools/bench_checkpoint.py --quick          a tenth of it, 3 rounds: its figures say little
    python tools/bench_checkpoint.py --folder /mnt/x  on that file system (default: the one for temporary files)

Every round runs each contender once, in turn, so that drift of the machine hits all alike; printed are medians over rounds. All write the
same tensors and sync their files. megalite also hashes every tensor, reads back what it wrote for the checksums, renames, and compares
the checksums before it loads. The training thread of an asynchronous save is blocked until it has copied the tensors; the first such
save, which also makes the buffers, is printed apart. Files are read from the page cache. The last line is JSON; the exit code is 1 when
the training thread is blocked for 25 % of a synchronous save or longer (not judged with --quick). Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megalite.checkpoint import newest_checkpoint
from megalite.checkpoint.files import describe_files
from megalite.checkpoint.hashes import content_hashes
from megalite.config import DataConfig, ModelConfig, OutputConfig, RunConfig, TrainConfig
from megalite.testing.parity import build_in_this_world
from megalite.testing.rank_pool import RankPool
from megalite.training.checkpoints import finish_saving, load_run, save_run
from megalite.training.setup import Run
from megalite.training.tensors import run_tensors

BLOCKED, SYNC, ASYNC, DCP, TORCH = (
    "blocked by an async save",
    "megalite, sync",
    "megalite, async until complete",
    "bare DCP",
    "torch.save, fsync",
)
LARGEST_BLOCKED = 0.25


def model_config(quick: bool) -> ModelConfig:
    sizes: dict[str, Any] = dict(num_layers=14, hidden_size=512, vocab_size=8192)
    if quick:
        sizes = dict(num_layers=4, hidden_size=256, vocab_size=4096)
    return ModelConfig(num_attention_heads=8, num_query_groups=8, **sizes)


def measure(folder: Path, quick: bool, rounds: int) -> dict[str, Any]:
    """{"save": seconds by contender and round, "load": ..., "parts": ..., "bytes"}. In the one rank."""
    torch.set_num_threads(1)
    output = OutputConfig(save=str(folder / "megalite"), async_save=True)
    data, training = DataConfig(mock_data=True, seq_length=16, num_workers=0), TrainConfig(micro_batch_size=1, train_iters=1, device="cpu")
    run = build_in_this_world(RunConfig(model=model_config(quick), data=data, train=training, output=output).resolve(), timeout_s=600)
    tensors = run_tensors(run)
    for number, tensor in enumerate(tensors.values()):
        tensor.normal_(generator=torch.Generator().manual_seed(number))
    seconds: dict[str, dict[str, list[float]]] = {"save": {}, "load": {}, "parts": {}}
    first = timed(lambda: save_run(run))  # makes the buffers
    finish_saving(run)
    for _ in range(rounds):
        one_round(run, tensors, folder, seconds)
    return {**seconds, "first_blocked": first, "bytes": sum(tensor.nbytes for tensor in tensors.values())}


def one_round(run: Run, tensors: dict[str, Tensor], folder: Path, seconds: dict[str, dict[str, list[float]]]) -> None:
    def note(kind: str, name: str, action: Callable[[], object]) -> None:
        seconds[kind].setdefault(name, []).append(timed(action))

    def save_synchronously() -> None:
        saver, run.saver = run.saver, None
        save_run(run)
        run.saver = saver

    for place in (folder / "megalite", folder / "dcp", folder / "torch"):
        shutil.rmtree(place, ignore_errors=True)
    os.sync()  # what was written before is no burden of the first contender
    note("save", SYNC, save_synchronously)
    path = newest_checkpoint(folder / "megalite")
    note("load", SYNC, lambda: load_run(run, path))
    note("parts", "content hashes", lambda: content_hashes(tensors, run.grid.world))
    note("parts", "checksums of files", lambda: describe_files(path, run.grid.world))
    shutil.rmtree(folder / "megalite")
    os.sync()
    begin = time.perf_counter()
    note("save", BLOCKED, lambda: save_run(run))
    finish_saving(run)
    seconds["save"].setdefault(ASYNC, []).append(time.perf_counter() - begin)
    shutil.rmtree(folder / "megalite")
    os.sync()
    note("save", DCP, lambda: dcp.save(tensors, checkpoint_id=str(folder / "dcp")))
    note("load", DCP, lambda: dcp.load(tensors, checkpoint_id=str(folder / "dcp")))
    shutil.rmtree(folder / "dcp")
    os.sync()
    note("save", TORCH, lambda: torch_save(tensors, folder / "torch"))
    note("load", TORCH, lambda: torch_load(tensors, folder / "torch"))


def torch_save(tensors: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    with (folder / "all.pt").open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def torch_load(tensors: dict[str, Tensor], folder: Path) -> None:
    for name, value in torch.load(folder / "all.pt", weights_only=True).items():
        tensors[name].copy_(value)


def timed(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def table(kind: str, seconds: dict[str, float], num_bytes: int, reference: str) -> None:
    print(f"\n{kind:34s} {'seconds':>8s} {'GB/s':>7s} {f'time over {reference}':>26s}")
    for name, value in seconds.items():
        print(f"{name:34s} {value:8.3f} {num_bytes / value / 1e9:7.2f} {value / seconds[reference]:26.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="times that every contender runs (default 5, with --quick 3)")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--folder", type=Path, help="where the checkpoints are written, and deleted again")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megalite-bench-", dir=arguments.folder) as name, RankPool(max_ranks=1) as pool:
        rounds = arguments.rounds or (3 if arguments.quick else 5)
        (found,) = pool.run(measure, 1, Path(name), arguments.quick, rounds, timeout=3600)
    medians = {kind: {name: statistics.median(values) for name, values in found[kind].items()} for kind in ("save", "load", "parts")}
    num_bytes, save, load = found["bytes"], medians["save"], medians["load"]
    print(f"{num_bytes / 1e6:.0f} MB: weights and two moments of {num_bytes / 12e6:.1f} M parameters; medians of {rounds} rounds")
    table("saving", save, num_bytes, DCP)
    table("loading", load, num_bytes, DCP)
    ratio = save[BLOCKED] / save[SYNC]
    parts = {name: value / save[SYNC] for name, value in medians["parts"].items()}
    print(f"\nof a synchronous save: {', '.join(f'{name} {share:.0%}' for name, share in parts.items())}")
    print(f"an async save blocks for {ratio:.1%} of a synchronous one (the first one {found['first_blocked'] / save[SYNC]:.1%})")
    figures = {
        "megabytes": round(num_bytes / 1e6),
        "blocked_ratio": ratio,
        "first_blocked_ratio": found["first_blocked"] / save[SYNC],
        "save_seconds": save,
        "load_seconds": load,
        "share_of_sync_save": parts,
        "save_over_dcp": save[SYNC] / save[DCP],
        "save_over_torch": save[SYNC] / save[TORCH],
        "load_over_dcp": load[SYNC] / load[DCP],
        "load_over_torch": load[SYNC] / load[TORCH],
    }
    print(json.dumps(figures))
    return 1 if ratio >= LARGEST_BLOCKED and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
