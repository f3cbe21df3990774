"""Trains one model in many layouts and compares: the promise "any layout, same numbers" as a table.

Decisions
- Every layout trains through the same `build_run` and `train_step` as a real run, on data in which some positions bear no loss, so that
  micro-batches have unequal numbers of tokens.
- Against one rank: initial weights are equal bit for bit, losses and gradient norms within a relative tolerance, weights after the last
  step within an absolute one.
- Among layouts that do the same arithmetic (equal tp, dp, zero, sequence parallelism, tying): losses, norms and weights are equal bit for
  bit over pp and schedule. Only a tied head adds its two gradients in another order when pp is 1, and is held to a tolerance there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch.distributed as dist

from megalite import comm
from megalite.config import DataConfig, ModelConfig, OptimConfig, RunConfig, TrainConfig
from megalite.data.loader import GlobalBatchLoader
from megalite.data.mock import MockDataset
from megalite.grid import Grid, GridShape
from megalite.testing.layouts import Layout
from megalite.training.loop import train_step
from megalite.training.setup import Run, build_programs, build_run_on
from megalite.validate import violations

__all__ = [
    "Difference",
    "Tolerance",
    "TrainedCase",
    "bitwise_differences",
    "build_in_this_world",
    "compare",
    "problems",
    "tiny_config",
    "train_case",
]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """Largest accepted differences in fp32: relative for loss and gradient norm, absolute for weights after the last step."""

    loss: float = 1e-5
    grad_norm: float = 1e-4
    weights: float = 1e-4
    tied: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class TrainedCase:
    """What one layout gave. initial: digest of every logical weight before the first step; weights: after the last."""

    losses: list[float]
    grad_norms: list[float]
    initial: dict[str, str]
    weights: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Largest differences from the reference; `initial` names weights whose first values differ in any bit."""

    loss: float
    grad_norm: float
    weights: float
    initial: list[str]

    def within(self, tolerance: Tolerance) -> bool:
        return (
            not self.initial and self.loss <= tolerance.loss and self.grad_norm <= tolerance.grad_norm and self.weights <= tolerance.weights
        )


def tiny_config() -> RunConfig:
    """A model for 1 to 8 ranks in which all sizes differ: prime vocabulary, 8 heads, 2 key/value heads (fewer than tp 4 and 8)."""
    return RunConfig(
        model=ModelConfig(
            num_layers=9,
            hidden_size=40,
            num_attention_heads=8,
            num_query_groups=2,
            kv_channels=6,
            ffn_hidden_size=56,
            vocab_size=131,
            make_vocab_size_divisible_by=8,
        ),
        data=DataConfig(mock_data=True, seq_length=16),
        optim=OptimConfig(lr=1e-3, lr_decay_style="constant", clip_grad=1.0),
        train=TrainConfig(micro_batch_size=2, global_batch_size=16, train_iters=3, device="cpu"),
    )


def problems(config: RunConfig, layout: Layout) -> list[str]:
    """Why `config` cannot be laid out like that; empty where it can."""
    return violations(layout.apply(config), layout.world_size)


def build_in_this_world(config: RunConfig, timeout_s: float = 60) -> Run:
    """The run of a resolved `config` on the CPU, in the world that exists. Collective. Raises MegaliteError subclasses."""
    world_size = dist.get_world_size()
    programs = build_programs(config, world_size)
    grid = Grid.build(GridShape(**config.grid_sizes(world_size)), "cpu", timedelta(seconds=timeout_s))
    return build_run_on(config, grid, *programs)


def train_case(config: RunConfig, layout: Layout, masked_fraction: float = 0.2, timeout_s: float = 60) -> TrainedCase | None:
    """Train `train_iters` steps in the world that exists. Collective; rank 0 returns the result, the others None."""
    config = replace(layout.apply(config).resolve(), train=replace(config.train, log_interval=config.train.train_iters))
    run = build_in_this_world(config, timeout_s)
    if config.data.mock_data:
        _mask_some_positions(run, masked_fraction)
    initial = {name: hashlib.sha256(value.tobytes()).hexdigest() for name, value in full_weights(run).items()}
    norms = []
    for _ in range(config.train.train_iters):
        record = train_step(run)
        norms.append(record.grad_norm.item())
        run.metrics.add(record)
    losses = run.metrics.report()
    run.train_loader.close()
    weights = full_weights(run)
    return TrainedCase(losses=losses, grad_norms=norms, initial=initial, weights=weights) if run.grid.rank == 0 else None


def full_weights(run: Run) -> dict[str, np.ndarray]:
    """All logical weights as whole arrays. Collective over the world."""
    local = {item.name: item.local.detach().cpu().numpy() for item in run.parameters}
    split_dims = {item.name: item.parameter.placements[-1].dim for item in run.parameters if item.tp_sharded}  # type: ignore[union-attr]
    # The order of cuts undone: data parallelism cut dimension 0 of what tp had left, so its parts are joined first.
    over_dp = _join(comm.all_gather_object(local, run.grid.dp_shard), dict.fromkeys(local, 0))
    over_tp = _join(comm.all_gather_object(over_dp, run.grid.tp), split_dims)
    everything: dict[str, np.ndarray] = {}
    for part in comm.all_gather_object(over_tp, run.grid.pp):
        everything.update(part)
    return everything


def _join(parts: list[dict[str, np.ndarray]], dims: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Every array's parts of all ranks along its dimension; the first rank's where it has none."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: np.concatenate([part[name] for part in parts], axis=dims[name]) if name in dims else value for name, value in parts[0].items()
    }


def _mask_some_positions(run: Run, masked_fraction: float) -> None:
    config, loader = run.config, run.train_loader
    dataset = MockDataset(
        config.model.known_vocab_size,
        config.data.seq_length,
        run.batch_sizes.consumed_before(config.train.train_iters),
        config.train.seed,
        masked_fraction=masked_fraction,
    )
    run.train_loader = GlobalBatchLoader(
        dataset,
        micro_batch_size=loader.micro_batch_size,
        global_batch_size=loader.batch_sizes,
        dp_rank=loader.dp_rank,
        dp_size=loader.dp_size,
        num_workers=0,
    )
    loader.close()


def compare(case: TrainedCase, reference: TrainedCase) -> Difference:
    """How far `case` is from `reference`; missing and extra weights count as differing initial values."""
    names = case.initial.keys() | reference.initial.keys()
    shared = case.weights.keys() & reference.weights.keys()
    return Difference(
        loss=_largest_relative(case.losses, reference.losses),
        grad_norm=_largest_relative(case.grad_norms, reference.grad_norms),
        weights=max(float(np.abs(case.weights[name] - reference.weights[name]).max(initial=0.0)) for name in shared),
        initial=sorted(name for name in names if case.initial.get(name) != reference.initial.get(name)),
    )


def bitwise_differences(case: TrainedCase, reference: TrainedCase) -> list[str]:
    """What differs in any bit: "loss", "grad norm" and names of weights."""
    differences = [] if case.losses == reference.losses else ["loss"]
    differences += [] if case.grad_norms == reference.grad_norms else ["grad norm"]
    names = sorted(case.weights.keys() | reference.weights.keys())
    return differences + [name for name in names if not _same_bits(case.weights.get(name), reference.weights.get(name))]


def _same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and a.tobytes() == b.tobytes()


def _largest_relative(values: list[float], reference: list[float]) -> float:
    assert len(values) == len(reference), "the runs made different numbers of steps"
    return max(abs(a - b) / max(abs(b), 1e-12) if np.isfinite(a) else np.inf for a, b in zip(values, reference, strict=True))
