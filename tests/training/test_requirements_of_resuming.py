"""Requirements about resuming that no other file names: what counts after a resume, and what a full disk leaves."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint import complete_checkpoints, step_of
from megalite.config import RunConfig
from megalite.errors import CheckpointError
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import load_run, save_run
from megalite.training.loop import train, train_step
from tests.ranks import run_ranks

STOP, STEPS = 2, 4


def config_with(folder: Path, *, lr: float = 1e-3, steps: int = STOP) -> RunConfig:
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=2),
        optim=replace(config.optim, lr=lr, min_lr=1e-5, lr_decay_style="cosine", lr_warmup_iters=1, lr_decay_iters=STEPS),
        train=replace(config.train, train_iters=steps, log_interval=1),
        output=replace(config.output, save=str(folder), save_interval=STOP, metrics_file=str(folder / "metrics.jsonl")),
    )


def train_from(config: RunConfig, load: Path | None) -> None:
    run = build_in_this_world(config.resolve())
    if load is not None:
        load_run(run, load)
    train(run)
    run.metrics.close()
    run.train_loader.close()


def rates_in(folder: Path) -> dict[int, float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {record["step"]: record["lr"] for record in records if "lr" in record}


def test_requirements_65_66_the_new_learning_rate_counts_and_is_a_function_of_the_step(tmp_path: Path) -> None:
    run_ranks(train_from, 2, Layout(pp=2).apply(config_with(tmp_path / "old")), None, timeout=60)
    config = config_with(tmp_path / "new", lr=4e-3, steps=STEPS)
    run_ranks(train_from, 2, Layout(pp=2).apply(config), tmp_path / "old", timeout=60)
    straight = config_with(tmp_path / "straight", lr=4e-3, steps=STEPS)
    run_ranks(train_from, 1, straight, None, timeout=60)
    expected = rates_in(tmp_path / "straight")
    assert rates_in(tmp_path / "new") == {step: rate for step, rate in expected.items() if step > STOP}
    assert rates_in(tmp_path / "old")[STOP] != expected[STOP], "another setting gives another rate"


def test_requirement_73_what_a_checkpoint_says_of_itself_is_json(tmp_path: Path) -> None:
    run_ranks(train_from, 1, config_with(tmp_path), None, timeout=60)
    manifest = json.loads((tmp_path / "step-0000002" / "manifest.json").read_text())
    assert RunConfig.from_dict(manifest["config"]).optim.lr_warmup_iters == 1
    assert manifest["tensors"]["model.embedding.word.weight"]["shape"] == [136, 40]


def test_a_line_that_a_killed_run_left_half_written_goes_when_the_file_is_continued(tmp_path: Path) -> None:
    run_ranks(train_from, 1, config_with(tmp_path), None, timeout=60)
    file = tmp_path / "metrics.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"step": 3, "lo')
    run_ranks(train_from, 1, config_with(tmp_path, steps=STEPS), tmp_path, timeout=60)
    assert file.read_text().startswith(whole)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4]


def save_with_too_little_room(config: RunConfig, limit: int | None) -> tuple[str, dict[str, Any]]:
    """Save after one step, again after a second, for which files may have `limit` bytes only. In every rank."""
    run = build_in_this_world(config.resolve())
    train_step(run)
    run.state.step = 1
    save_run(run)
    weights = full_weights(run)
    train_step(run)
    run.state.step = 2
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        save_run(run)
    except CheckpointError as error:
        return str(error), weights
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "", weights


def weights_in(config: RunConfig, folder: Path) -> dict[str, Any]:
    run = build_in_this_world(config.resolve())
    load_run(run, folder)
    return full_weights(run)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system that one checkpoint of the model fills by more than half."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=900k", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def check_a_failed_save(config: RunConfig, folder: Path, limit: int | None, reason: str) -> None:
    found = run_ranks(save_with_too_little_room, 2, Layout(tp=2).apply(config), limit, timeout=60)
    for error, _ in found:
        assert reason in error and "older checkpoints are as they were" in error, error
    assert [step_of(path) for path in complete_checkpoints(folder)] == [1]
    assert not list(folder.glob(".*.tmp")), "what was half written is gone"
    (loaded,) = run_ranks(weights_in, 1, config, folder, timeout=60)
    assert all((loaded[name] == value).all() for name, value in found[0][1].items())


def test_requirement_71_a_file_that_cannot_grow_costs_no_older_checkpoint(tmp_path: Path) -> None:
    check_a_failed_save(config_with(tmp_path, steps=STEPS), tmp_path, 60_000, "File too large")


def test_requirement_71_a_disk_that_is_full_costs_no_older_checkpoint(small_disk: Path) -> None:
    check_a_failed_save(config_with(small_disk, steps=STEPS), small_disk, None, "No space left on device")
