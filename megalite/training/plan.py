"""What a configuration needs, before anything is launched: memory and communication of every pipeline rank.

Decisions
- All ranks with the same place in the pipeline need the same, but for slices that do not divide evenly: the fullest is predicted.
- Nothing here needs a process group: the ranks of the run need not exist.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.config import RunConfig
from megalite.grid import AXES, Axis, Grid, GridShape
from megalite.model import GPTStage
from megalite.pipeline.lowering import Program
from megalite.pipeline.runtime import splits_backward
from megalite.planner.comm_volume import Traffic, data_parallel_traffic, rehearse_traffic, total_traffic
from megalite.planner.plan import BuildStage, RankMemory, parameter_shapes, plan_rank
from megalite.planner.rehearsal import BatchShape
from megalite.planner.states import Sharding
from megalite.tensor_parallel.deferral import WeightGradQueue
from megalite.training.stages import compute_dtype, loss_settings, new_stage, parallel_context

__all__ = ["plan_memory", "plan_traffic"]


def plan_memory(config: RunConfig, program: Program, world_size: int, rank: int, device_type: str) -> RankMemory:
    """Of the ranks at place `rank` of the pipeline. config: resolved; program: of a training step; device_type: where it will run.

    Raises ConfigError as building the model would.
    """
    tp = config.parallel.tensor_model_parallel_size
    axis = Axis.single("tp") if tp == 1 else Axis.rehearsal("tp", tp)
    build = _builder(_with_loss_pieces(config, device_type, tp), program, axis)
    shape, sharding = _batch_shape(config), _sharding(config, world_size)
    return plan_rank(config, program, rank, build, sharding, shape, splits_backward=splits_backward(program))


def plan_traffic(config: RunConfig, program: Program, world_size: int, rank: int, device_type: str) -> list[Traffic]:
    """What a rank at place `rank` of the pipeline sends in one step, by axis and operation. Arguments and errors: of `plan_memory`."""
    sizes, tp = config.grid_sizes(world_size), config.parallel.tensor_model_parallel_size
    grid_shape = GridShape(**sizes)
    grid = Grid.rehearsal(grid_shape, grid_shape.rank_of(pp=rank))
    build = _builder(_with_loss_pieces(config, device_type, tp), program, grid.tp)
    counted = rehearse_traffic(program, grid, build, _batch_shape(config))
    parameters = [
        parameter for number in program.schedule.stages_of(rank) for parameter in parameter_shapes(config, build(number, None), number)
    ]
    axes = (*(getattr(grid, name) for name in AXES), grid.dp, grid.embedding)
    return [
        *total_traffic(counted, {axis.name: axis.size for axis in axes}),
        *data_parallel_traffic(parameters, _sharding(config, world_size), program.schedule.num_microbatches),
    ]


def _builder(config: RunConfig, program: Program, tp: Axis) -> BuildStage:
    """Makes stages on the meta device."""

    def build(number: int, queue: WeightGradQueue | None) -> GPTStage:
        return new_stage(config, program.schedule, number, parallel_context(config, tp, queue))

    return build


def _sharding(config: RunConfig, world_size: int) -> Sharding:
    sizes = config.grid_sizes(world_size)
    return Sharding(
        zero=config.zero,
        dp_shard=sizes["dp_shard"],
        dp_replicate=sizes["dp_replicate"],
        compute_itemsize=compute_dtype(config).itemsize,
        reduce_itemsize=2 if config.numerics.grad_reduce_in_bf16 else 4,
    )


def _batch_shape(config: RunConfig) -> BatchShape:
    length, micro_batch = config.data.seq_length, config.train.micro_batch_size
    split = config.parallel.tensor_model_parallel_size if config.parallel.use_sequence_parallel else 1
    edge = (length // split, micro_batch, config.model.hidden_size)
    return BatchShape(sequence=length, micro_batch=micro_batch, edge=edge, dtype=compute_dtype(config))


def _with_loss_pieces(config: RunConfig, device_type: str, tp: int) -> RunConfig:
    """The size of the pieces, which depends on the device, as a setting."""
    pieces = loss_settings(config).most_tokens(config.model.padded_vocab_size // tp, device_type)
    return replace(config, memory=replace(config.memory, loss_chunk_tokens=pieces))
