"""Where a run writes and what it goes on from: no other run's checkpoint is written over, no changed setting goes unsaid."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from megalite.batch_sizes import BatchSizes
from megalite.checkpoint import Manifest, step_directory
from megalite.checkpoint.changes import changed_settings, model_conflicts
from megalite.config import ModelConfig, OutputConfig, RunConfig
from megalite.config_io import assign
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Grid, GridShape
from megalite.testing.parity import tiny_config
from megalite.training.checkpoints import load_run
from megalite.training.datasets import training_samples
from megalite.training.loop import train
from megalite.training.outputs import check_outputs, check_save_folder
from megalite.training.setup import build_programs, build_run_on
from megalite.training.state import TrainState
from tests.ranks import run_ranks


def test_every_path_that_cannot_be_written_is_named_and_nothing_is_left_behind(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    bad = OutputConfig(
        save=str(tmp_path / "file"),
        tensorboard_dir=str(tmp_path / "file" / "below"),
        metrics_file=str(tmp_path),
        trace_pipeline="/proc/nowhere/trace.jsonl",
    )
    with pytest.raises(ConfigError, match="4 settings are wrong") as caught:
        check_outputs(bad)
    for violation, name in zip(caught.value.violations, ("save", "tensorboard_dir", "metrics_file", "trace_pipeline"), strict=True):
        assert violation.startswith(f"{name} {getattr(bad, name)} cannot be written: ")
    assert (tmp_path / "file").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_paths_that_can_be_written_are_left_as_they_were(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    check_outputs(
        OutputConfig(save=str(tmp_path / "a/b"), metrics_file=str(tmp_path / "metrics.jsonl"), trace_pipeline=str(tmp_path / "t"))
    )
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "metrics.jsonl"]
    check_outputs(OutputConfig())


def write_checkpoint(folder: Path, step: int) -> None:
    step_directory(folder, step).mkdir(parents=True)
    (step_directory(folder, step) / "manifest.json").write_text(Manifest(step=step, consumed_samples=1, config={}, tensors={}).to_json())


def test_later_checkpoints_of_an_earlier_run_are_not_written_over(tmp_path: Path) -> None:
    check_save_folder(tmp_path / "new", 0)
    for step in (3, 6):
        write_checkpoint(tmp_path, step)
    check_save_folder(tmp_path, 6)
    for step in (0, 3):
        with pytest.raises(CheckpointError, match=rf"step-0000006 .* starts at step {step}: .*--load {tmp_path}"):
            check_save_folder(tmp_path, step)
    (step_directory(tmp_path, 6) / "manifest.json").unlink()  # nothing that anybody could load
    check_save_folder(tmp_path, 3)


def through_json(config: RunConfig) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict()))


def test_requirement_65_changed_settings_are_said_old_and_new() -> None:
    config = assign(tiny_config(), {"rampup_batch_size": (4, 4, 8), "data_path": ("a", "b")})
    assert changed_settings(through_json(config), config.to_dict()) == []
    other = assign(config, {"lr": 2e-3, "rampup_batch_size": None, "seed": 5, "tensor_model_parallel_size": 2, "save": "elsewhere"})
    assert changed_settings(through_json(config), other.to_dict()) == [
        "lr 0.001 -> 0.002",
        "rampup_batch_size (4, 4, 8) -> None",
        "seed 1234 -> 5",
    ]
    assert changed_settings({"optim": 3, "strange": {}}, other.to_dict()) == []


@pytest.mark.parametrize(
    ("changes", "conflicts"),
    [
        ({}, []),
        ({"num_query_groups": 4, "kv_channels": 10, "ffn_hidden_size": 106}, []),  # what was derived, written out
        ({"hidden_dropout": 0.3, "rotary_base": 5e5, "init_method_std": 0.1}, []),
        ({"num_attention_heads": 2, "kv_channels": 20}, ["num_attention_heads 4", "num_query_groups 4", "kv_channels 10"]),
        ({"norm_epsilon": 1e-6}, ["norm_epsilon 1e-05 in the checkpoint, 1e-06 in the run"]),
        ({"activation": "gelu"}, ["activation swiglu"]),
        ({"position_embedding_type": "none", "rotary_percent": 0.5}, ["position_embedding_type rope", "rotary_percent 1.0"]),
    ],
)
def test_requirement_75_another_model_of_the_same_shapes_is_found(changes: dict[str, Any], conflicts: list[str]) -> None:
    model = ModelConfig(hidden_size=40, num_attention_heads=4, ffn_hidden_size=106)
    stored = through_json(RunConfig(model=replace(model, vocab_size=131)))
    found = model_conflicts(stored, replace(model, vocab_size=131, **changes))
    assert [line[: len(start)] for line, start in zip(found, sorted_like(found, conflicts), strict=True)] == sorted_like(found, conflicts)


def sorted_like(found: list[str], starts: list[str]) -> list[str]:
    """`starts` in the order of the lines that begin with them; unknown ones last."""
    return sorted(starts, key=lambda start: next((n for n, line in enumerate(found) if line.startswith(start)), len(found)))


def test_samples_of_a_run_that_goes_on() -> None:
    plain, ramp = BatchSizes(12), BatchSizes(12, (4, 4, 20))
    for sizes in (plain, ramp):
        for step in range(8):
            assert training_samples(sizes, TrainState(step, sizes.consumed_before(step)), 7) == sizes.consumed_before(max(step, 7))
    assert training_samples(BatchSizes(4), TrainState(3, 24), 6) == 24 + 3 * 4


def resume_after(config: RunConfig, folder: Path) -> tuple[list[float], list[str]]:
    """Two steps that save, then on to step 4 with a quarter of the batch and another rate; losses and log lines of the second run."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    grid = Grid.build(GridShape(), "cpu", timedelta(seconds=60))
    first = replace(config, train=replace(config.train, train_iters=2), output=replace(config.output, save=str(folder))).resolve()
    train(build_run_on(first, grid, *build_programs(first, 1)))
    second = assign(config, {"train_iters": 4, "global_batch_size": 4, "lr": 5e-4}).resolve()
    run = build_run_on(second, grid, *build_programs(second, 1), step_directory(folder, 2))
    logger = logging.getLogger("megalite")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        load_run(run, folder)
        losses = train(run)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        run.train_loader.close()
    assert run.state == TrainState(4, 2 * 16 + 2 * 4)
    return losses, lines


def test_a_run_goes_on_with_another_batch_size_and_says_what_changed(tmp_path: Path) -> None:
    ((losses, lines),) = run_ranks(resume_after, 1, tiny_config(), tmp_path)
    assert len(losses) == 2
    (said,) = [line for line in lines if line.startswith("changed since then: ")]
    assert said == "changed since then: lr 0.001 -> 0.0005, global_batch_size 16 -> 4, train_iters 2 -> 4"
