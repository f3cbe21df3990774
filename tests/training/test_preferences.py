"""Training by preference: the loss is that of the paper, in every layout, and begins at log 2 with the reference's own scores."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config import RunConfig
from megalite.grid import Axis
from megalite.model.preference import preference_loss
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.training.checkpoints import save_run
from megalite.training.loop import train
from tests.ranks import run_ranks
from tools import score_preferences


def test_the_loss_is_that_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 4, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 7, (5, 4), generator=generator)
    mask = (torch.rand(5, 4, generator=generator) > 0.3).double()
    reference = torch.tensor([-5.0, -6.5, -4.0, -3.0], dtype=torch.float64)
    got = preference_loss(logits, targets, mask, reference, beta=0.3, vocab_size=7, padded_vocab_size=7, tp=Axis.single())
    log_p = (logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0] * mask).sum(0)
    expected = 0.0
    for chosen, rejected in ((0, 1), (2, 3)):
        margin = 0.3 * ((log_p[chosen] - reference[chosen]) - (log_p[rejected] - reference[rejected]))
        expected += -math.log(1 / (1 + math.exp(-margin)))
    assert got.item() == pytest.approx(expected, rel=1e-9)


def config_with(folder: Path, pairs: Path | None) -> RunConfig:
    config = tiny_config()
    data = replace(config.data, seq_length=64, mock_data=pairs is None, tokenizer_type="bytes")
    return replace(
        config,
        model=replace(config.model, num_layers=4, vocab_size=257),
        data=replace(data, dpo_data_path=None if pairs is None else str(pairs)),
        optim=replace(config.optim, lr=3e-3),
        train=replace(config.train, micro_batch_size=2, global_batch_size=8, train_iters=4),
        output=replace(config.output, save=str(folder), save_interval=1),
    )


def save_reference(config: RunConfig) -> None:
    run = build_in_this_world(config.resolve())
    save_run(run)
    run.train_loader.close()


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs with the scores of a model as it is initialised: the one that runs of `config_with` start from."""
    folder = tmp_path_factory.mktemp("pairs")
    run_ranks(save_reference, 1, config_with(folder, None), timeout=60)
    records = [{"prompt": f"say {n}", "chosen": "good " * (n % 3 + 1), "rejected": "bad" * (n % 4 + 1)} for n in range(7)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--load", str(folder), "--input", str(folder / "pairs.jsonl"), "--output", str(folder / "scored.jsonl"), "--device", "cpu"]
    assert score_preferences.main(arguments) == 0
    assert score_preferences.main(arguments) == 2, "nothing is written over"
    return folder / "scored.jsonl"


def train_all(config: RunConfig, layout: Layout) -> tuple[list[float], dict[str, Any]]:
    run = build_in_this_world(layout.apply(config).resolve())
    losses = train(run)
    run.metrics.close()
    run.train_loader.close()
    return losses, full_weights(run)


def test_every_layout_trains_alike_from_log_2_down(scored: Path, tmp_path: Path) -> None:
    config = config_with(tmp_path, scored)
    config = replace(config, output=replace(config.output, save=None, save_interval=None))
    (losses, weights), *_ = run_ranks(train_all, 1, config, Layout(), timeout=60)
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5), "the model is the reference"
    assert losses[-1] < losses[0] - 0.01
    for layout in (Layout(tp=2, pp=2, schedule="zb-h1", sequence_parallel=True), Layout(dp=2, zero=3)):
        (others, other_weights), *_ = run_ranks(train_all, layout.world_size, config, layout, timeout=90)
        assert others == pytest.approx(losses, rel=1e-5), str(layout)
        for name, value in weights.items():
            np.testing.assert_allclose(other_weights[name], value, atol=2e-4, rtol=0, err_msg=f"{layout} {name}")
