"""Stopping and resuming gives the run that never stopped: bit for bit in the same layout, within the parity tolerance in another.

Requirements 67 (data order) and 70 (random numbers): dropout is on, and its masks come back too.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config import RunConfig
from megalite.errors import CheckpointError
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import load_run
from megalite.training.loop import train
from tests.ranks import run_ranks

STEPS, STOP = 6, 3
LAYOUTS = [
    Layout(),
    Layout(tp=2, pp=2, dp=2, zero=3, schedule="1f1b", sequence_parallel=True),
    Layout(tied=True, pp=2, dp=2, zero=1, schedule="interleaved-1f1b"),
    Layout(tied=True, pp=2, schedule="zb-v"),
]


def config_with(save: Path | None, steps: int = STEPS) -> RunConfig:
    """Dropout on: its masks must come back too. The learning rate moves every step."""
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=4, hidden_dropout=0.1, attention_dropout=0.1),
        optim=replace(config.optim, lr_decay_style="cosine", lr_warmup_iters=2, lr_decay_iters=STEPS),
        train=replace(config.train, train_iters=steps, log_interval=2),
        output=replace(config.output, save=None if save is None else str(save), save_interval=STOP),
    )


def run_layout(config: RunConfig, layout: Layout, load: Path | None) -> tuple[list[float], dict]:
    """Train to the end of `config`, from a checkpoint if given. In every rank."""
    config = layout.apply(config).resolve()
    run = build_in_this_world(config)
    if load is not None:
        load_run(run, load)
    losses = train(run)
    run.metrics.close()
    run.train_loader.close()
    return losses, full_weights(run)


def run(config: RunConfig, layout: Layout, load: Path | None = None) -> tuple[list[float], dict]:
    results = run_ranks(run_layout, layout.world_size, config, layout, load, timeout=120)
    assert all(losses == results[0][0] for losses, _ in results), "every rank reports the same losses"
    return results[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_resumed_run_equals_straight_run_bit_for_bit(layout: Layout, tmp_path: Path) -> None:
    straight_losses, straight = run(config_with(None), layout)
    first_losses, _ = run(config_with(tmp_path, steps=STOP), layout)
    second_losses, resumed = run(config_with(None), layout, tmp_path)
    assert first_losses + second_losses == straight_losses
    assert all((resumed[name] == straight[name]).all() for name in straight)


def test_checkpoint_of_one_layout_continues_in_another(tmp_path: Path) -> None:
    config = replace(config_with(tmp_path), model=replace(config_with(None).model, hidden_dropout=0.0, attention_dropout=0.0))
    straight, _ = run(config, LAYOUTS[1])
    for layout in (Layout(), Layout(pp=2, schedule="gpipe"), Layout(tp=4), Layout(dp=4, zero=2)):
        other = replace(config, output=replace(config.output, save=None))
        losses, _ = run(other, layout, tmp_path / f"step-{STOP:07d}")
        assert losses == pytest.approx(straight[STOP:], rel=1e-5), str(layout)


def test_requirement_72_a_checkpoint_that_does_not_fit_is_refused_with_the_differences(tmp_path: Path) -> None:
    run(config_with(tmp_path, steps=STOP), Layout())
    other = config_with(None)
    other = replace(other, model=replace(other.model, ffn_hidden_size=64, add_qkv_bias=True))
    with pytest.raises(Exception, match="does not fit this model") as caught:
        run(other, Layout(), tmp_path)
    assert CheckpointError.__name__ in str(caught.value)
    assert "layers.0.attention.q_proj.bias: missing from the checkpoint" in str(caught.value)
    assert "optimizer." not in str(caught.value).split("Traceback")[0]
    assert "shape [56, 40] in the checkpoint, [64, 40] in the model" in str(caught.value)


def test_the_newest_complete_checkpoint_is_taken(tmp_path: Path) -> None:
    run(config_with(tmp_path), Layout())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-0000003", "step-0000006"]
    assert (tmp_path / "latest").read_text().strip() == "step-0000006"
    (tmp_path / "step-0000006" / "manifest.json").unlink()
    losses, _ = run(config_with(None), Layout(), tmp_path)
    assert len(losses) == STEPS - STOP
