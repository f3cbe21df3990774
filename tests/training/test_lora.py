"""Training adapters: every layout trains the same ones, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.store import newest_checkpoint
from megalite.config import LoraConfig, RunConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import load_run, save_run
from megalite.training.frozen import load_base
from megalite.training.loop import train, train_step
from tests.ranks import run_ranks

STEPS = 3
ALL = LoraConfig(lora_r=3, lora_alpha=7.0, lora_targets=("all-linear",), lora_ranks=(r"layers\.1\.attention=2", r"layers\.0\.=0"))
DORA = replace(ALL, use_dora=True, use_rslora=True, lora_alphas=("down_proj=3",))


def lora_config(lora: LoraConfig, save: Path | None = None) -> RunConfig:
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=4),
        optim=replace(config.optim, lr=1e-2),
        train=replace(config.train, train_iters=STEPS),
        output=replace(config.output, save=None if save is None else str(save), save_interval=STEPS),
        lora=lora,
    )


def make_base(config: RunConfig) -> None:
    run = build_in_this_world(config.resolve())
    train_step(run)
    run.state.step = 1
    save_run(run)
    run.train_loader.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the model, one step after its start."""
    folder = tmp_path_factory.mktemp("base")
    run_ranks(make_base, 1, lora_config(LoraConfig(), folder), timeout=60)
    return folder


def train_adapters(config: RunConfig, layout: Layout, load: Path | None = None) -> tuple[list[float], dict[str, Any], list[str]]:
    run = build_in_this_world(layout.apply(config).resolve())
    load_base(run)
    before = {name: value.detach().clone() for stage in run.stages.values() for name, value in stage.named_parameters()}
    if load is not None:
        load_run(run, load)
    losses = train(run)
    moved = [
        name
        for stage in run.stages.values()
        for name, value in stage.named_parameters()
        if ".adapter." not in name and not torch.equal(_local(before[name]), _local(value.detach()))
    ]
    run.metrics.close()
    run.train_loader.close()
    return losses, full_weights(run), moved


def _local(value: Any) -> torch.Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def run_layout(config: RunConfig, layout: Layout, load: Path | None = None) -> tuple[list[float], dict[str, Any]]:
    results = run_ranks(train_adapters, layout.world_size, config, layout, load, timeout=120)
    assert all(losses == results[0][0] for losses, _, _ in results)
    assert not [name for _, _, moved in results for name in moved], "a frozen weight has moved"
    return results[0][0], results[0][1]


CASES = [
    (ALL, Layout(tp=2, pp=2, dp=2, zero=3, sequence_parallel=True)),
    (ALL, Layout(pp=2, dp=2, zero=1, schedule="interleaved-1f1b")),  # nothing on the first stage is trained
    (ALL, Layout(tp=2, pp=2, schedule="zb-v", tied=True)),
    (DORA, Layout(tp=2, pp=2, schedule="zb-h1")),
    (DORA, Layout(tp=2, dp=2, zero=2, sequence_parallel=True)),
]


@pytest.fixture(scope="module")
def reference(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(base, losses, adapters) of one rank, by configuration and tying."""

    @cache
    def trained(lora: LoraConfig, tied: bool) -> tuple[Path, list[float], dict[str, Any]]:
        folder = base
        if tied:
            folder = tmp_path_factory.mktemp("tied")
            run_ranks(make_base, 1, Layout(tied=True).apply(lora_config(LoraConfig(), folder)), timeout=60)
        return folder, *run_layout(lora_config(replace(lora, lora_base=str(folder))), Layout(tied=tied))

    return trained


@pytest.mark.parametrize(("lora", "layout"), CASES, ids=lambda value: str(value) if isinstance(value, Layout) else "")
def test_every_layout_trains_the_same_adapters(lora: LoraConfig, layout: Layout, reference: Any) -> None:
    base, losses, weights = reference(lora, layout.tied)
    config = lora_config(replace(lora, lora_base=str(base)))
    assert losses[-1] != losses[0]
    other_losses, other_weights = run_layout(config, layout)
    assert other_losses == pytest.approx(losses, rel=1e-5)
    assert other_weights.keys() == weights.keys()
    assert all(".adapter." in name for name in weights)
    for name, value in weights.items():
        np.testing.assert_allclose(other_weights[name], value, atol=1e-4, rtol=0, err_msg=name)


def test_a_run_with_adapters_saves_them_alone_and_resumes_in_another_layout(base: Path, tmp_path: Path) -> None:
    config = lora_config(replace(DORA, lora_base=str(base), lora_dropout=0.2), tmp_path)
    longer = replace(config, train=replace(config.train, train_iters=2 * STEPS), output=replace(config.output, save=None))
    straight, weights = run_layout(longer, Layout(tp=2))
    first, _ = run_layout(config, Layout(tp=2))
    assert first == straight[:STEPS]
    rest, resumed = run_layout(longer, Layout(tp=2), tmp_path)
    assert rest == straight[STEPS:], "bit for bit, dropout included"
    assert all((resumed[name] == weights[name]).all() for name in weights)
    others, _ = run_layout(replace(longer, lora=replace(longer.lora, lora_dropout=0.0)), Layout(pp=2, dp=2, zero=3), tmp_path)
    assert len(others) == STEPS
    assert all(".adapter." in name for name in read_manifest(newest_checkpoint(tmp_path)).tensors)


INT8 = replace(DORA, quantize_base="int8")


def quantized(weights: dict[str, Any]) -> dict[str, Any]:
    """The base as integers make it, in numpy."""
    changed = dict(weights)
    for name, value in weights.items():
        if name.startswith("layers.") and name.endswith("_proj.weight"):
            scales = np.abs(value).max(axis=1, keepdims=True) / np.float32(127)
            changed[name] = np.rint(value / scales) * scales
    return changed


def save_quantized(config: RunConfig, folder: Path) -> None:
    """A base whose weights are what integers would make of those in `folder`."""
    run = build_in_this_world(config.resolve())
    load_run(run, folder)
    weights = quantized(full_weights(run))
    with torch.no_grad():
        for parameter in run.parameters:
            parameter.local.copy_(torch.from_numpy(weights[parameter.name]))
    save_run(run)


INT8_LAYOUTS = [Layout(tp=2, dp=2, zero=3, sequence_parallel=True), Layout(tp=2, schedule="zb-h1", pp=2)]


@pytest.fixture(scope="module")
def of_integers(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Any]]:
    """What one rank trains on the weights that integers stand for."""
    folder = tmp_path_factory.mktemp("integers")
    run_ranks(save_quantized, 1, lora_config(LoraConfig(), folder), base, timeout=60)
    return run_layout(lora_config(replace(DORA, lora_base=str(folder))), Layout())


@pytest.mark.parametrize("layout", INT8_LAYOUTS, ids=str)
def test_an_integer_base_trains_like_the_weights_that_it_stands_for(layout: Layout, base: Path, of_integers: Any) -> None:
    losses, weights = of_integers
    with_integers, others = run_layout(lora_config(replace(INT8, lora_base=str(base))), layout)
    assert with_integers == pytest.approx(losses, rel=1e-5)
    for name, value in weights.items():
        np.testing.assert_allclose(others[name], value, atol=1e-4, rtol=0, err_msg=name)
