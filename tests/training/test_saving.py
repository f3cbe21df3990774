"""Saves in the background and saves that fail: what is on disk is always a run to go on from.

Requirements 71 (a crash or a full disk leaves nothing that a resume trusts) and 74 (one save at the last step).
"""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from megalite.checkpoint import complete_checkpoints, read_manifest, step_of
from megalite.checkpoint import store as store_module
from megalite.config import RunConfig
from megalite.errors import CheckpointError
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import load_run, save_run
from megalite.training.loop import train, train_step
from tests.ranks import run_ranks

LAYOUT = Layout(pp=2, dp=2, zero=3)


def config_with(folder: Path, steps: int = 6, **output: Any) -> RunConfig:
    config = tiny_config()
    config = replace(
        config,
        model=replace(config.model, num_layers=4),
        train=replace(config.train, train_iters=steps, log_interval=2),
        output=replace(config.output, save=str(folder), save_interval=2, **output),
    )
    return LAYOUT.apply(config).resolve()


def train_all(config: RunConfig) -> tuple[list[float], dict[str, Any]]:
    run = build_in_this_world(config)
    return train(run), full_weights(run)


def steps_in(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in complete_checkpoints(folder))


def test_background_saves_hold_the_state_of_their_step(tmp_path: Path) -> None:
    """Training goes on while they are written, and must not show in them."""
    plain, background = tmp_path / "plain", tmp_path / "background"
    losses, _ = run_ranks(train_all, 4, config_with(plain), timeout=120)[0]
    assert run_ranks(train_all, 4, config_with(background, async_save=True), timeout=120)[0][0] == losses
    assert steps_in(plain) == steps_in(background) == [2, 4, 6]
    for one, other in zip(complete_checkpoints(plain), complete_checkpoints(background), strict=True):
        hashes = [{name: facts["hash"] for name, facts in read_manifest(path).tensors.items()} for path in (one, other)]
        assert hashes[0] == hashes[1]
        assert all(hashes[0].values())
    assert not list(background.glob(".*.tmp"))


def test_old_checkpoints_are_deleted_as_new_ones_are_complete(tmp_path: Path) -> None:
    run_ranks(train_all, 4, config_with(tmp_path, 8, keep_last=1, keep_every=4, async_save=True), timeout=120)
    assert steps_in(tmp_path) == [4, 8]


def full_disk(config: RunConfig, fails_at: int) -> tuple[str, int]:
    """Train on a disk that is full at the save with number `fails_at` (from 1). In every rank: the error, and the steps made."""
    run = build_in_this_world(config)
    save, number = dcp.save, 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        if number == fails_at:
            (Path(kwargs["checkpoint_id"]) / f"half-{run.grid.rank}").write_bytes(b"half")
            dist.barrier(kwargs["process_group"])  # DCP fails on all ranks together, when none writes any more
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(*args, **kwargs)

    store_module.dcp.save = failing  # type: ignore[assignment]
    try:
        train(run)
    except CheckpointError as error:
        return str(error), run.state.step
    finally:
        store_module.dcp.save = save  # type: ignore[assignment]
    return "", run.state.step


@pytest.mark.parametrize("in_background", [False, True])
def test_requirement_71_a_full_disk_ends_the_run_and_leaves_older_checkpoints(tmp_path: Path, in_background: bool) -> None:
    config = config_with(tmp_path, async_save=in_background)
    for error, step in run_ranks(full_disk, 4, config, 2, timeout=120):
        assert "No space left on device" in error
        assert "older checkpoints are as they were" in error
        assert step == (6 if in_background else 4)  # in the background it is said at the next save
    assert steps_in(tmp_path) == [2]
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("in_background", [False, True])
def test_requirement_71_a_run_may_go_on_after_a_failed_save(tmp_path: Path, in_background: bool) -> None:
    config = config_with(tmp_path, async_save=in_background, on_save_failure="continue")
    found = run_ranks(full_disk, 4, config, 2, timeout=120)
    assert {step for _, step in found} == {6}
    assert steps_in(tmp_path) == [2, 6]


def in_vanished_folder(config: RunConfig, folder: Path) -> str:
    run = build_in_this_world(config)
    train_step(run)
    if run.grid.rank == 0:
        shutil.rmtree(folder)
        folder.write_text("a file is in the way")
    try:
        save_run(run)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "save"
    folder.mkdir()
    for error in run_ranks(in_vanished_folder, 4, config_with(folder), folder, timeout=60):
        assert str(folder) in error


def load_with(config: RunConfig, folder: Path) -> tuple[str, int]:
    run = build_in_this_world(config)
    try:
        load_run(run, folder)
    except CheckpointError as error:
        return str(error), -1
    return "", run.state.step


def test_a_damaged_checkpoint_stops_the_run_or_gives_way_to_an_older_one(tmp_path: Path) -> None:
    run_ranks(train_all, 4, config_with(tmp_path), timeout=120)
    file = next((tmp_path / "step-0000006").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for error, _ in run_ranks(load_with, 4, config_with(tmp_path), tmp_path, timeout=60):
        assert file.name in error
        assert "step-0000004 is older and complete" in error
    assert set(run_ranks(load_with, 4, config_with(tmp_path, on_damaged_checkpoint="older"), tmp_path, timeout=60)) == {("", 4)}


def weights_only(config: RunConfig, folder: Path) -> tuple[int, int, bool, dict[str, Any]]:
    run = build_in_this_world(config)
    load_run(run, folder)
    is_fresh = all(not moment.any() for moments in run.optimizer.named_state().values() for moment in moments.values())
    return run.state.step, run.train_loader.consumed_samples, is_fresh, full_weights(run)


def test_requirement_69_weights_alone_begin_a_new_run_with_these_weights(tmp_path: Path) -> None:
    _, weights = run_ranks(train_all, 4, config_with(tmp_path), timeout=120)[0]
    config = config_with(tmp_path, load_weights_only=True)
    for step, samples, is_fresh, found in run_ranks(weights_only, 4, config, tmp_path, timeout=60):
        assert (step, samples, is_fresh) == (0, 0, True)
        assert all((found[name] == weights[name]).all() for name in weights)
