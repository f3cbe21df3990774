"""A ramp of the batch size: the same samples in the same order, resumed across a border bit for bit, in any layout."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.optim import lr_at
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import load_run
from megalite.training.loop import train
from tests.ranks import run_ranks

RAMPUP, FULL, STEPS = (4, 4, 20), 12, 6
CONSUMED = [4, 8, 12, 20, 32, 44]  # sizes 4 4 4 | 8 | 12 12
LAYOUTS = [Layout(), Layout(pp=2, dp=2, schedule="1f1b")]


def config_for(folder: Path, name: str, *, steps: int = STEPS, rampup: tuple[int, ...] | None = RAMPUP, save_at: int = 99) -> RunConfig:
    config, save = tiny_config(), str(folder / name) if save_at < 99 else None
    return replace(
        config,
        model=replace(config.model, hidden_dropout=0.1),
        optim=replace(config.optim, lr_decay_style="cosine", lr_warmup_iters=1, lr_decay_iters=4),
        train=replace(config.train, train_iters=steps, global_batch_size=FULL, rampup_batch_size=rampup, log_interval=2),
        output=replace(config.output, metrics_file=str(folder / f"{name}.jsonl"), save=save, save_interval=save_at),
    )


def run_layout(config: RunConfig, layout: Layout, load: Path | None) -> tuple[list[float], dict, list[list[int]]]:
    """Losses, final weights, and the sizes and first samples of the steps' micro-batches. In every rank."""
    config = layout.apply(config).resolve()
    run = build_in_this_world(config)
    if load is not None:
        load_run(run, load)
    read: list[list[int]] = []
    next_step = run.train_loader.next_step

    def recorded():
        micro_batches = next_step()
        read.append([batch.first_sample for batch in micro_batches])
        return micro_batches

    run.train_loader.next_step = recorded
    losses = train(run)
    run.metrics.close()
    run.train_loader.close()
    return losses, full_weights(run), read


def run(config: RunConfig, layout: Layout, load: Path | None = None) -> tuple[list[float], dict, list[list[int]]]:
    """The losses and weights, and what all ranks read together in each step."""
    results = run_ranks(run_layout, layout.world_size, config, layout, load, timeout=120)
    read = [sorted({first for _, _, steps in results for first in steps[step]}) for step in range(len(results[0][2]))]
    return results[0][0], results[0][1], read


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_resuming_across_a_border_equals_the_straight_run_bit_for_bit(layout: Layout, tmp_path: Path) -> None:
    """Requirement 67 with a ramp; it stops where the size goes from 4 to 8."""
    straight_losses, straight, read = run(config_for(tmp_path, "straight"), layout)
    assert read == [list(range(start, end, 2)) for start, end in zip([0, *CONSUMED[:-1]], CONSUMED, strict=True)]
    first, _, read_first = run(config_for(tmp_path, "first", steps=3, save_at=3), layout)
    second, resumed, read_second = run(config_for(tmp_path, "second"), layout, tmp_path / "first")
    assert read_first + read_second == read
    assert first + second == straight_losses
    assert all((resumed[name] == straight[name]).all() for name in straight)


def test_the_rate_follows_the_samples_and_the_layout_changes_nothing(tmp_path: Path) -> None:
    losses = [run(config_for(tmp_path, f"run{number}"), layout)[0] for number, layout in enumerate(LAYOUTS)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    records = [json.loads(line) for line in (tmp_path / "run0.jsonl").read_text().splitlines()]
    assert [record["consumed_samples"] for record in records] == CONSUMED
    optim = config_for(tmp_path, "x").optim
    starts = [0, *CONSUMED[:-1]]
    expected = [lr_at(optim, start / FULL, 99, (end - start) / FULL) for start, end in zip(starts, CONSUMED, strict=True)]
    assert [record["lr"] for record in records] == expected
    assert expected[0] == optim.lr / 3, "a third of the full size is a third of the one step of warm-up"
    assert expected[2] == optim.lr > expected[4] > expected[5] == pytest.approx(lr_at(optim, 32 / 12, 99))


def test_a_ramp_of_one_size_is_no_ramp(tmp_path: Path) -> None:
    with_ramp, plain = (run(config_for(tmp_path, f"r{bool(ramp)}", steps=3, rampup=ramp), Layout()) for ramp in ((FULL, 4, 100), None))
    assert with_ramp[0] == plain[0]
    assert all((with_ramp[1][name] == plain[1][name]).all() for name in plain[1])
