"""One training step in one layout with every living tensor counted, beside the prediction: for tests and `tools/bench_memory.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from megalite.config import RunConfig
from megalite.config_numerics import MemoryConfig
from megalite.planner.live_storages import storage_bytes
from megalite.testing.layouts import Layout
from megalite.testing.parity import build_in_this_world, tiny_config
from megalite.training.loop import train_step
from megalite.training.tensors import run_tensors

__all__ = ["MemoryCase", "gradient_bytes", "measure", "memory_config"]

Rows = dict[str, tuple[int, int | None]]


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """What to lay out how."""

    layout: Layout = field(default_factory=Layout)
    precision: Literal["fp32", "bf16"] = "fp32"
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __str__(self) -> str:
        granularity = self.memory.recompute_granularity
        return f"{self.layout} {self.precision}" + ("" if granularity == "none" else f" recompute {granularity}")


def memory_config(case: MemoryCase) -> RunConfig:
    """A model whose activations weigh more than its weights, so that neither can hide an error of the other."""
    config = tiny_config()
    config = replace(
        config,
        model=replace(config.model, num_layers=8, hidden_size=72, kv_channels=10, ffn_hidden_size=200, vocab_size=509),
        data=replace(config.data, seq_length=64),
        train=replace(config.train, global_batch_size=48 if case.layout.dp % 3 == 0 else 16),
        numerics=replace(config.numerics, precision=case.precision),
        memory=replace(case.memory, memory_report=True),
    )
    return case.layout.apply(config).resolve()


def measure(case: MemoryCase) -> tuple[int, Rows]:
    """(place in the pipeline, {what: (predicted, measured) bytes}) of this rank. Collective."""
    run = build_in_this_world(memory_config(case), timeout_s=120)
    assert run.memory is not None
    for _ in range(2):
        with run.memory.around_step(run):
            train_step(run)
    return run.grid.pp.rank, run.memory.rows()


def gradient_bytes(case: MemoryCase) -> tuple[int, int]:
    """(bytes of weights, gradients and optimizer state of this rank as the optimizer finds them, parameters of the model). Collective."""
    run = build_in_this_world(memory_config(case), timeout_s=120)
    held: list[int] = []
    step = run.optimizer.step

    def look(*arguments: object) -> None:
        gradients = [parameter.parameter.grad for parameter in run.parameters if parameter.parameter.grad is not None]
        held.append(storage_bytes([*run_tensors(run).values(), *gradients]))
        step(*arguments)  # type: ignore[arg-type]

    run.optimizer.step = look  # type: ignore[method-assign]
    train_step(run)
    return held[0], sum(parameter.parameter.numel() for parameter in run.parameters)
