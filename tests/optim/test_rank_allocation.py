"""Directions of adapters are dropped by importance, in every layout alike, and stay dropped."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalite.config import LoraConfig, RunConfig
from megalite.optim.rank_allocation import budget_at, chosen_directions
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import load_run
from megalite.training.loop import train
from tests.ranks import run_ranks

LORA = LoraConfig(
    lora_r=3,
    lora_targets=("q_proj", "o_proj"),
    lora_average_rank=1.5,
    lora_allocation_end=5,
    lora_allocation_start=1,
    lora_allocation_interval=2,
)
STEPS = 6


def test_the_budget_falls_from_all_to_the_target() -> None:
    budgets = [budget_at(update, 10, 20, 100, 20) for update in range(25)]
    assert budgets[:11] == [100] * 11 and budgets[20:] == [20] * 5
    assert budgets[15] == 20 + 80 // 8
    assert all(late <= early for early, late in pairwise(budgets))


def test_the_most_important_directions_of_all_layers_are_kept() -> None:
    scores = {"x": [0.5, 3.0, 0.1], "w": [0.5, 0.2]}
    assert chosen_directions(scores, 2) == {"x": [0.0, 1.0, 0.0], "w": [1.0, 0.0]}, "of equal ones the first by name"
    assert chosen_directions(scores, 0) == {"x": [0.0] * 3, "w": [0.0] * 2}


def config_with(save: Path | None, steps: int = STEPS) -> RunConfig:
    config = tiny_config()
    output = replace(config.output, save=None if save is None else str(save), save_interval=3)
    return replace(
        config,
        model=replace(config.model, num_layers=2),
        optim=replace(config.optim, lr=2e-2),
        train=replace(config.train, train_iters=steps),
        lora=LORA,
        output=output,
    )


def train_all(config: RunConfig, layout: Layout, load: Path | None) -> tuple[list[float], dict[str, Any], dict[str, list[float]]]:
    run = build_in_this_world(layout.apply(config).resolve())
    if load is not None:
        load_run(run, load)
    losses = train(run)
    run.metrics.close()
    run.train_loader.close()
    assert run.ranks is not None
    kept = {name: value.tolist() for name, value in run.ranks.named_state().items() if name.endswith("kept")}
    return losses, full_weights(run), kept


def run_layout(config: RunConfig, layout: Layout, load: Path | None = None) -> tuple[list[float], dict[str, Any], dict[str, list[float]]]:
    results = run_ranks(train_all, layout.world_size, config, layout, load, timeout=90)
    kept: dict[str, list[float]] = {}
    for _, _, part in results:
        assert all(kept.get(name, flags) == flags for name, flags in part.items()), "ranks that share a layer keep the same"
        kept |= part
    return results[0][0], results[0][1], kept


def test_every_layout_drops_the_same_and_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    losses, weights, kept = run_layout(config_with(None), Layout())
    assert sum(sum(flags) for flags in kept.values()) == 1.5 * 4
    assert len({sum(flags) for flags in kept.values()}) > 1, f"layers are equally important: {json.dumps(kept)}"
    for name, flags in kept.items():
        columns = abs(weights[name.replace(".kept", ".b")]).sum(0) > 0
        assert columns.tolist() == [flag == 1.0 for flag in flags]
    layout = Layout(tp=2, dp=2, zero=3, sequence_parallel=True)
    other_losses, _, other_kept = run_layout(config_with(tmp_path), layout)
    assert other_losses == pytest.approx(losses, rel=1e-5)
    assert other_kept == kept
    assert run_layout(config_with(None), Layout(pp=2))[2] == kept, "layers of several stages are chosen from together"
    rest, resumed, _ = run_layout(config_with(None), layout, tmp_path / "step-0000003")
    straight, straight_weights, _ = run_layout(config_with(None), layout)
    assert rest == straight[3:]
    assert all((resumed[name] == value).all() for name, value in straight_weights.items())
