"""Numbers that go wrong: noticed in every precision on all ranks alike, skipped or stopped by policy, and never in a checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.config import DataConfig, NumericsConfig, RunConfig
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, full_weights, tiny_config
from megalite.testing.rank_pool import RankFailure
from megalite.training.aftermath import settle
from megalite.training.checkpoints import load_run
from megalite.training.loop import train, train_step
from megalite.training.setup import Run
from tests.ranks import run_ranks
from tests.training.test_data_run import VOCAB, write

ONE = Layout()
SPREAD = [Layout(pp=2), Layout(tp=2, sequence_parallel=True), Layout(dp=2, zero=3), Layout(dp=2), Layout(pp=2, schedule="zb-h1")]


def config_with(steps: int, save: Path | None = None, interval: int | None = None, **numerics: Any) -> RunConfig:
    config = tiny_config()
    return replace(
        config,
        model=replace(config.model, num_layers=2),
        train=replace(config.train, train_iters=steps, log_interval=1, global_batch_size=8),
        numerics=NumericsConfig(**numerics),
        output=replace(config.output, save=None if save is None else str(save), save_interval=interval),
    )


def poison(run: Run, step: int, factor: float) -> None:
    """Multiply gradients of the last rank (and of its replicas) by `factor` in step `step`, as a bad batch would."""
    normal, grid = run.runtime.train_step, run.grid
    is_last = all(axis.rank == axis.size - 1 for axis in (grid.pp, grid.tp, grid.dp_shard))

    def train_step_of_runtime(*arguments: Any) -> torch.Tensor:
        loss = normal(*arguments)
        if run.state.step + 1 == step and is_last:
            grads = [grad for p in run.parameters if p.name.startswith("layers.") and (grad := p.local_grad) is not None and grad.numel()]
            for grad in grads:
                grad.mul_(factor)
        return loss

    run.runtime.train_step = train_step_of_runtime  # type: ignore[method-assign]


def run_poisoned(config: RunConfig, layout: Layout, step: int, factor: float) -> dict[str, Any]:
    """Train with one poisoned gradient; what the rank saw."""
    run = build_in_this_world(layout.apply(config).resolve())
    poison(run, step, factor)
    weights = []
    for _ in range(config.train.train_iters):
        train_step(run)
        weights.append({name: value.copy() for name, value in full_weights(run).items()})
    settle(run)
    run.train_loader.close()
    return {"skipped": run.state.skipped_steps, "updates": run.optimizer.num_steps, "weights": weights}


@pytest.mark.parametrize("layout", SPREAD, ids=str)
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_requirement_61_a_bad_gradient_on_one_rank_is_skipped_on_all(layout: Layout, factor: float) -> None:
    for found in run_ranks(run_poisoned, layout.world_size, config_with(3, on_nonfinite="skip"), layout, 2, factor, timeout=120):
        assert (found["skipped"], found["updates"]) == (1, 2)
        before, after, last = found["weights"]
        assert all(before[name].tobytes() == after[name].tobytes() for name in before), "a skipped step leaves every bit"
        assert any(before[name].tobytes() != last[name].tobytes() for name in before)
        assert all(np.isfinite(value).all() for value in last.values())


def run_to_the_end(config: RunConfig, layout: Layout, step: int, factor: float, load: Path | None = None) -> list[float]:
    run = build_in_this_world(layout.apply(config).resolve())
    if load is not None:
        load_run(run, load)
    poison(run, step, factor)
    try:
        return train(run)
    finally:
        run.metrics.close()
        run.train_loader.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_requirement_61_the_run_stops_and_nothing_bad_is_saved(precision: str, tmp_path: Path) -> None:
    config = config_with(6, tmp_path, 1, precision=precision)
    with pytest.raises(
        RankFailure, match=r"gradient norm is nan at step 4 .*not updated and not saved.*on-nonfinite skip.*samples 24 to 31"
    ):
        run_ranks(run_to_the_end, 1, config, ONE, 4, math.nan)
    assert (tmp_path / "latest").read_text().strip() == "step-0000003"
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(math.isfinite(line["loss"]) for line in lines)
    assert lines[-1]["grad_norm"] is None


def test_too_many_skipped_steps_end_the_run() -> None:
    config = replace(config_with(9, on_nonfinite="skip", max_skipped_steps=2), optim=replace(tiny_config().optim, lr=1e30))
    with pytest.raises(RankFailure, match="3 steps in a row went without an update"):
        run_ranks(run_to_the_end, 1, config, ONE, 99, 1.0)


def test_requirement_62_fp16_backs_off_and_ends_like_the_unforced_run() -> None:
    settings = dict(precision="fp16", initial_loss_scale=2.0**30, hysteresis=1)
    skipped = run_ranks(run_and_weights, 1, config_with(20, **settings))[0][2]["skipped"]
    assert skipped > 5
    forced, _, state, updates = run_ranks(run_and_weights, 1, config_with(80 + skipped, **settings))[0]
    assert updates == 80 + skipped - state["skipped"] > 75
    assert state["loss_scale"] < 2.0**30
    for numerics in (dict(precision="fp16"), {}):
        losses = run_ranks(run_and_weights, 1, config_with(80, **numerics))[0][0]
        assert abs(np.mean(forced[-20:]) / np.mean(losses[-20:]) - 1) < 0.02


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, pp=2, dp=2, zero=2, sequence_parallel=True), Layout(pp=2, schedule="zb-h1", tied=True)], ids=str
)
def test_fp16_in_other_layouts(layout: Layout) -> None:
    losses = run_ranks(run_to_the_end, layout.world_size, config_with(4, precision="fp16"), layout, 99, 1.0, timeout=120)[0]
    expected = run_ranks(run_to_the_end, 1, config_with(4, precision="fp16"), Layout(tied=layout.tied), 99, 1.0)[0]
    assert losses == pytest.approx(expected, rel=5e-3)


def test_requirement_62_the_smallest_scale_ends_the_run_with_advice() -> None:
    config = config_with(9, precision="fp16", initial_loss_scale=2.0**40, min_loss_scale=2.0**40, hysteresis=1)
    with pytest.raises(RankFailure, match=r"overflow at step 1 with the smallest loss scale.*bf16"):
        run_ranks(run_to_the_end, 1, config, ONE, 99, 1.0)


def run_and_weights(config: RunConfig, load: Path | None = None) -> tuple[list[float], dict[str, np.ndarray], dict[str, Any], float]:
    run = build_in_this_world(config.resolve())
    if load is not None:
        load_run(run, load)
    losses = train(run)
    run.metrics.close()
    run.train_loader.close()
    return losses, full_weights(run), {**run.guard.state(), "skipped": run.state.skipped_steps}, run.optimizer.num_steps


def test_requirement_62_a_checkpoint_of_nothing_but_skipped_steps_goes_on_bit_for_bit(tmp_path: Path) -> None:
    numerics = dict(precision="fp16", initial_loss_scale=2.0**36, hysteresis=1, loss_scale_window=3, spike_factor=30.0)
    straight = run_ranks(run_and_weights, 1, config_with(24, **numerics))[0]
    first = run_ranks(run_and_weights, 1, config_with(4, tmp_path, **numerics))[0]
    assert (first[2]["skipped"], first[3]) == (4, 0)
    second = run_ranks(run_and_weights, 1, config_with(24, **numerics), tmp_path)[0]
    assert straight[0] == first[0] + second[0]
    assert straight[2:] == second[2:]
    assert straight[3] > 0
    assert all(straight[1][name].tobytes() == second[1][name].tobytes() for name in straight[1])


@pytest.mark.parametrize("layout", [ONE, Layout(pp=2, dp=2, zero=1)], ids=str)
def test_a_spike_is_skipped_and_dissected(layout: Layout, tmp_path: Path) -> None:
    prefix = write(tmp_path / "text", 3)
    config = config_with(12, tmp_path / "run", spike_factor=20.0, skip_spikes=True)
    config = replace(
        config, model=replace(config.model, vocab_size=VOCAB), data=DataConfig(data_path=(prefix,), seq_length=12, split="1,0,0")
    )
    run_ranks(run_to_the_end, layout.world_size, config, layout, 10, 1e6, timeout=120)
    report = json.loads((tmp_path / "run/autopsy-step-10.json").read_text())
    assert (report["step"], report["samples"], report["update"]) == (10, [72, 79], "skipped")
    assert report["grad_norm"] > 20 * report["median_grad_norm"] > 0
    norms = report["grad_norms"]
    assert math.sqrt(sum(norm**2 for norm in norms.values())) == pytest.approx(report["grad_norm"], rel=1e-5)
    assert max(norms, key=norms.__getitem__).startswith("layers.")
    assert sorted(report["activation_norms"]) == ["layers.0", "layers.1"]
    assert min(report["activation_norms"].values()) > 0
    assert {use["sample"] for use in report["documents"]} == set(range(72, 80))
    assert {use["dataset"] for use in report["documents"]} == {prefix}


def test_the_activations_of_an_autopsy_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    found = []
    for layout in (ONE, Layout(tp=2, pp=2, sequence_parallel=True)):
        folder = tmp_path / str(layout.world_size)
        run_ranks(
            run_to_the_end, layout.world_size, config_with(10, folder, spike_factor=20.0, skip_spikes=True), layout, 9, 1e6, timeout=120
        )
        found.append(json.loads((folder / "autopsy-step-9.json").read_text())["activation_norms"])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def run_rewinding(config: RunConfig, step: int, factor: float) -> dict[str, Any]:
    run = build_in_this_world(config.resolve())
    poison(run, step, factor)
    losses = train(run)
    run.train_loader.close()
    return {"losses": losses, "state": run.state, "updates": run.optimizer.num_steps, "weights": full_weights(run)}


def test_a_rewind_undoes_updates_and_goes_on_with_later_data() -> None:
    config = config_with(16, spike_factor=20.0, rewind_steps=4)
    config = replace(config, optim=replace(config.optim, optimizer="sgd", lr=1e-2, clip_grad=0.0))
    harmed, plain = (
        run_ranks(run_rewinding, 1, c, 11, 1e6)[0] for c in (config, replace(config, numerics=NumericsConfig(spike_factor=20.0)))
    )
    again = run_ranks(run_rewinding, 1, config, 11, 1e6)[0]
    assert harmed["losses"] == again["losses"]
    # back after step 8, known in step 12: steps 9 to 12 leave nothing
    assert (harmed["state"].step, harmed["state"].skipped_steps, harmed["updates"]) == (16, 4, 12)
    assert (harmed["state"].consumed_samples, harmed["state"].skipped_samples) == (128, 32)
    assert harmed["losses"][:11] == plain["losses"][:11]
    largest = [max(np.abs(value).max() for value in case["weights"].values()) for case in (harmed, plain)]
    assert largest[0] < 2 < 100 < largest[1], "without going back, the update destroys the model"


def spoil_a_replica(config: RunConfig, layout: Layout) -> None:
    run = build_in_this_world(layout.apply(config).resolve())
    if run.grid.rank == 1:
        run.parameters[0].local.view(-1)[0] += 1e-3
    try:
        train(run)
    finally:
        run.train_loader.close()


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(dp=2)], ids=str)
def test_replicas_that_drift_apart_end_the_run(layout: Layout) -> None:
    run_ranks(run_to_the_end, layout.world_size, config_with(2, check_replicas_interval=1), layout, 99, 1.0)
    name = "norm" if layout.tp > 1 else "embedding"
    config = config_with(3, check_replicas_interval=2)
    if layout.tp > 1:
        config = replace(config, model=replace(config.model, normalization="LayerNorm"))
    with pytest.raises(RankFailure, match="after step 2, ranks that should hold equal weights do not"):
        run_ranks(spoil_whole if name == "norm" else spoil_a_replica, layout.world_size, config, layout)


def spoil_whole(config: RunConfig, layout: Layout) -> None:
    run = build_in_this_world(layout.apply(config).resolve())
    if run.grid.rank == 1:
        next(p for p in run.parameters if not p.tp_sharded).local.view(-1)[0] += 1e-3
    try:
        train(run)
    finally:
        run.train_loader.close()
