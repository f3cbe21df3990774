"""Runs that end early end on all ranks after the same step, with one save. Requirement 74."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megalite.checkpoint import complete_checkpoints, step_of
from megalite.config_output import OutputConfig
from megalite.grid import Axis
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training import loop
from megalite.training.loop import train
from megalite.training.stop import Stop
from tests.ranks import run_ranks
from tests.training.test_launcher import ENDLESS, ROOT, children_of, wait_until


def run_with_signal(folder: Path, at_step: int, number: int, in_evaluation: bool) -> tuple[int, int, str | None, int]:
    """One rank alone gets the signal. In every rank: steps, evaluations finished, reason, exit code."""
    config = tiny_config()
    config = replace(
        config,
        model=replace(config.model, num_layers=4),
        train=replace(config.train, train_iters=50, log_interval=1, eval_interval=2, eval_iters=5),
        output=OutputConfig(save=str(folder)),
    )
    run = build_in_this_world(Layout(pp=2, dp=2).apply(config).resolve())
    step, finished = loop.train_step, []

    def signalled(run: Any) -> Any:
        record = step(run)
        if run.state.step == at_step and dist.get_rank() == 3 and not in_evaluation:
            os.kill(os.getpid(), number)
        return record

    evaluate = run.runtime.evaluate

    def evaluated(*args: Any) -> Any:
        if in_evaluation and run.state.step == at_step and dist.get_rank() == 3:
            os.kill(os.getpid(), number)
        return evaluate(*args)

    run.metrics.report_evaluation = lambda *args: finished.append(args)  # type: ignore[method-assign]
    run.runtime.evaluate = evaluated  # type: ignore[method-assign]
    loop.train_step = signalled  # type: ignore[assignment]
    try:
        with run.stop.signals():
            train(run)
    finally:
        loop.train_step = step
    return run.state.step, len(finished), run.stop.reason, run.stop.exit_code


def test_requirement_74_a_signal_to_one_rank_stops_all_after_the_same_step(tmp_path: Path) -> None:
    for found in run_ranks(run_with_signal, 4, tmp_path, 3, signal.SIGUSR1, False, timeout=60):
        assert found == (4, 1, "SIGUSR1 was received", 0)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [4]


def test_requirement_74_a_signal_ends_an_evaluation(tmp_path: Path) -> None:
    for found in run_ranks(run_with_signal, 4, tmp_path, 4, signal.SIGTERM, True, timeout=60):
        assert found == (4, 1, "SIGTERM was received", 143)
    assert [step_of(path) for path in complete_checkpoints(tmp_path)] == [4]


def test_limits_of_a_lone_rank() -> None:
    world = Axis.single("world")
    interval = Stop(OutputConfig(exit_interval=3), world)
    assert [interval.poll(step) for step in (1, 2, 3)] == [False, False, True]
    assert interval.exit_code == 0
    late = Stop(OutputConfig(exit_duration_in_mins=1e-9), world)
    assert [late.poll(1), late.poll(2)] == [False, True]
    assert late.reason == "the time limit is reached"


def test_requirement_74_torchrun_passes_sigterm_on_and_the_run_saves(tmp_path: Path) -> None:
    """The whole way: a scheduler's SIGTERM to torchrun, one checkpoint, a code that is not success."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *ENDLESS]
    save = tmp_path / "save"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    said = tmp_path / "said"
    with said.open("w") as output, subprocess.Popen(
        [*command, "--save", str(save)], cwd=ROOT, env=environment, stdout=output, stderr=output
    ) as launcher:  # fmt: skip
        try:
            wait_until(lambda: "| loss" in said.read_text(), 100)
            assert len(children_of(launcher.pid)) == 2
            launcher.send_signal(signal.SIGTERM)
            assert launcher.wait(timeout=60) != 0
        finally:
            launcher.kill()
    assert len(complete_checkpoints(save)) == 1
    assert "stopping after step" in said.read_text()
