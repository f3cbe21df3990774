"""A whole model on one rank from what other layouts saved."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.checkpoint.whole_model import load_model
from megalite.config import RunConfig
from megalite.errors import CheckpointError
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.loop import train
from tests.generation.helpers import save_stage, tiny_run, tiny_stage
from tests.ranks import run_ranks


def train_and_save(config: RunConfig) -> dict:
    """Two steps in the world that exists; the weights that were saved. In every rank."""
    run = build_in_this_world(config)
    train(run)
    run.train_loader.close()
    return full_weights(run)


@pytest.mark.parametrize(
    "layout",
    [Layout(tied=True, tp=2, pp=2, schedule="1f1b", sequence_parallel=True), Layout(dp=2, zero=3)],
    ids=str,
)
def test_any_layout_loads_on_one_rank_without_a_process_group(layout: Layout, tmp_path: Path) -> None:
    config = tiny_config()
    config = replace(
        config,
        model=replace(config.model, num_layers=3),
        train=replace(config.train, train_iters=2),
        output=replace(config.output, save=str(tmp_path)),
    )
    config = layout.apply(config).resolve()
    saved = run_ranks(train_and_save, layout.world_size, config, timeout=120)[0]
    assert not dist.is_initialized()
    stage, stored = load_model(tmp_path)
    assert stored == config
    assert not stage.training
    loaded = {name: parameter.detach() for name, parameter in stage.named_parameters()}
    assert loaded.keys() == saved.keys()
    for name, value in loaded.items():
        assert torch.equal(value, torch.as_tensor(saved[name])), name


def weights(stage: torch.nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in stage.named_parameters()}


def test_a_checkpoint_or_its_folder_may_be_named(tmp_path: Path) -> None:
    config = tiny_run()
    stage = tiny_stage(config)
    checkpoint = save_stage(tmp_path, stage, config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in (checkpoint, tmp_path, str(tmp_path)):
            loaded, stored = load_model(path)
            assert stored == config
            assert all(torch.equal(value, weights(stage)[name]) for name, value in weights(loaded).items())


def test_a_checkpoint_without_a_weight_is_refused(tmp_path: Path) -> None:
    config = tiny_run()
    stage = tiny_stage(config)
    del stage.layers["1"].mlp.up_proj
    save_stage(tmp_path, stage, config)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight: missing from the checkpoint"):
        load_model(tmp_path)


def test_a_manifest_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    config = tiny_run()
    checkpoint = save_stage(tmp_path, tiny_stage(config), config)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config"]["model"]["num_expert"] = 8
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="num_expert"):
        load_model(checkpoint)
    with pytest.raises(CheckpointError, match="not a directory"):
        load_model(tmp_path / "nothing")
