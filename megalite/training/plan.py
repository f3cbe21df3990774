"""What a configuration needs, before anything is launched: memory of every pipeline rank.

Decisions
- All ranks with the same place in the pipeline need the same, but for slices that do not divide evenly: the fullest is predicted.
- Nothing here needs a process group: the ranks of the run need not exist.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.config import RunConfig
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.pipeline.lowering import Program
from megalite.pipeline.runtime import splits_backward
from megalite.planner.plan import RankMemory, plan_rank
from megalite.planner.rehearsal import BatchShape
from megalite.planner.states import Sharding
from megalite.tensor_parallel.deferral import WeightGradQueue
from megalite.training.stages import compute_dtype, loss_settings, new_stage, parallel_context

__all__ = ["plan_memory"]


def plan_memory(config: RunConfig, program: Program, world_size: int, rank: int, device_type: str) -> RankMemory:
    """Of the ranks at place `rank` of the pipeline. config: resolved; program: of a training step; device_type: where it will run.

    Raises ConfigError as building the model would.
    """
    sizes, tp = config.grid_sizes(world_size), config.parallel.tensor_model_parallel_size
    axis = Axis.single("tp") if tp == 1 else Axis.rehearsal("tp", tp)
    config = _with_loss_pieces(config, device_type, tp)

    def build(number: int, queue: WeightGradQueue | None) -> GPTStage:
        return new_stage(config, program.schedule, number, parallel_context(config, axis, queue))

    dtype = compute_dtype(config)
    sharding = Sharding(
        zero=config.zero,
        dp_shard=sizes["dp_shard"],
        dp_replicate=sizes["dp_replicate"],
        compute_itemsize=dtype.itemsize,
        reduce_itemsize=2 if config.numerics.grad_reduce_in_bf16 else 4,
    )
    length = config.data.seq_length
    edge_length = length // tp if config.parallel.use_sequence_parallel else length
    micro_batch = config.train.micro_batch_size
    edge = (edge_length, micro_batch, config.model.hidden_size)
    shape = BatchShape(sequence=length, micro_batch=micro_batch, edge=edge, dtype=dtype)
    return plan_rank(config, program, rank, build, sharding, shape, splits_backward=splits_backward(program))


def _with_loss_pieces(config: RunConfig, device_type: str, tp: int) -> RunConfig:
    """The size of the pieces, which depends on the device, as a setting."""
    pieces = loss_settings(config).most_tokens(config.model.padded_vocab_size // tp, device_type)
    return replace(config, memory=replace(config.memory, loss_chunk_tokens=pieces))
