"""A run ends when it is told to, or when the launcher is gone: soon, with a non-zero code, and without a pile of tracebacks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from megalite import comm
from megalite.grid import Grid, GridShape
from megalite.testing.layouts import Layout
from megalite.testing.parity import tiny_config
from megalite.training.launch import library_comm_error
from megalite.training.loop import train_step
from megalite.training.setup import build_programs, build_run_on
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
ENDLESS = (
    "pretrain_gpt.py --mock-data --vocab-size 31 --num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mbs 1 --gbs 2 "
    "--train-iters 1000000 --log-interval 1 --device cpu --pp 2"
).split()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)], ids=["interrupt", "kill"])
def test_ranks_end_with_the_launcher(number: signal.Signals, code: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *ENDLESS]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    said = tmp_path / "said"
    # a shell that starts a job in the background may have switched SIGINT off, which children inherit
    with said.open("w") as output, subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=output, stderr=output, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
    ) as launcher:  # fmt: skip
        try:
            wait_until(lambda: "| loss" in said.read_text(), 100)
            ranks = children_of(launcher.pid)
            assert len(ranks) == 2
            os.kill(launcher.pid, number)
            assert launcher.wait(timeout=60) == code
            wait_until(lambda: not any(map(is_alive, ranks)), 30)
        finally:
            launcher.kill()
    ours = re.split(r"(?m)^[WE]\d{4} ", said.read_text())
    ours_text = ours[0] + "".join(part for part in ours[1:] if "torch/distributed/run.py" not in part)
    assert "Traceback" not in ours_text, said.read_text()
    assert ("interrupted" if number == signal.SIGINT else "torchrun is gone") in said.read_text()


def wait_until(is_so, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.1)


def children_of(parent: int) -> list[int]:
    return [int(number) for number in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def is_alive(process: int) -> bool:
    """Running: a process that has ended and waits for its parent to notice does not count."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def hang_in_data_parallelism() -> tuple[str, str]:
    """Rank 1 of two stays away from the second step; what rank 0 gets, and what becomes of an error without a collective."""
    config = Layout(dp=2, zero=3).apply(tiny_config()).resolve()
    grid = Grid.build(GridShape(**config.grid_sizes(2)), "cpu", timedelta(seconds=2))
    run = build_run_on(config, grid, *build_programs(config, 2))
    train_step(run)
    microbatches = run.train_loader.next_step()
    comm.barrier(grid.world)
    if grid.rank == 1:
        time.sleep(4)
        return "", ""
    run.grid.progress.doing = "step 2"
    try:
        run.runtime.train_step(run.train_programs[len(microbatches)], microbatches, 1.0)
    except RuntimeError as error:
        said = str(library_comm_error(error, grid))
    try:
        torch.matmul(torch.ones(2), torch.ones(3))
    except RuntimeError as error:
        other = str(library_comm_error(error, grid))
    return said, other


def test_a_time_out_inside_fsdp_names_axis_and_step() -> None:
    said, other = run_ranks(hang_in_data_parallelism, 2)[0]
    assert re.match(r"a collective over axis dp \(ranks 0, 1\) failed during step 2, forward of micro-batch 0 on stage 0: .*imed out", said)
    assert other == "None"
