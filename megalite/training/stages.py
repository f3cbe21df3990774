"""How the stages of a rank are made from a configuration: the layers, their tp context, data parallelism around them."""

from __future__ import annotations

import torch

from megalite.config import RunConfig
from megalite.data_parallel import shard_stage
from megalite.grid import Axis, Grid
from megalite.model import GPTStage, materialize
from megalite.model.adapters import add_adapters
from megalite.pipeline.from_config import stage_specs
from megalite.pipeline.lowering import Program
from megalite.pipeline.schedules import Schedule
from megalite.tensor_parallel.chunked_loss import LossSettings
from megalite.tensor_parallel.deferral import WeightGradQueue
from megalite.tensor_parallel.fp8 import fp8_product
from megalite.tensor_parallel.parameter import ParallelContext

__all__ = ["build_stages", "compute_dtype", "loss_settings", "new_stage", "parallel_context"]


def build_stages(config: RunConfig, grid: Grid, program: Program, weight_grads: WeightGradQueue | None = None) -> dict[int, GPTStage]:
    """This rank's stages, materialised unit by unit and sharded over data parallelism. weight_grads: for programs that split backwards.

    Raises ConfigError where fp8 is asked for and cannot be had.
    """
    schedule, context = program.schedule, parallel_context(config, grid.tp, weight_grads, grid.device)
    stages = {}
    for number in schedule.stages_of(grid.pp.rank):
        stage = new_stage(config, schedule, number, context)
        shard_stage(
            stage,
            stage.units(),
            grid,
            zero=config.zero,
            compute_dtype=compute_dtype(config),
            reduce_dtype=torch.bfloat16 if config.numerics.grad_reduce_in_bf16 else torch.float32,
            materialize=lambda prefix, module: materialize(module, prefix, grid.device, config.train.seed),
        )
        stages[number] = stage
    return stages


def new_stage(config: RunConfig, schedule: Schedule, number: int, context: ParallelContext) -> GPTStage:
    """Stage `number`, not materialised, where `context.device` is the meta device."""
    stage = GPTStage(
        config.model,
        stage_specs(config, schedule)[number],
        context,
        num_stages=schedule.num_stages,
        seed=config.train.seed,
        loss=loss_settings(config),
        memory=config.memory,
    )
    add_adapters(stage, config.lora)
    return stage


def parallel_context(
    config: RunConfig, tp: Axis, weight_grads: WeightGradQueue | None, device: torch.device | None = None
) -> ParallelContext:
    """What the layers of a stage are built with. device: where they will multiply, None where they never will."""
    fp8 = config.numerics.fp8
    return ParallelContext(
        tp=tp,
        sequence_parallel=config.parallel.use_sequence_parallel,
        device="meta",
        weight_grads=weight_grads,
        product=None if fp8 is None or device is None else fp8_product(fp8, device),
    )


def compute_dtype(config: RunConfig) -> torch.dtype:
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[config.numerics.precision]


def loss_settings(config: RunConfig) -> LossSettings:
    numerics = config.numerics
    return LossSettings(
        chunk_tokens=config.memory.loss_chunk_tokens,
        label_smoothing=numerics.label_smoothing,
        z_loss=numerics.z_loss,
        preference_beta=None if config.data.dpo_data_path is None else numerics.dpo_beta,
    )
