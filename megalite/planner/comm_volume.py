"""What a rank sends in one training step, by axis and operation.

Decisions
- What goes through `comm` is counted by `comm`, in a dry run over axes of ranks that do not exist: the runtime executes the program of
  the rank, and every stage one micro-batch, on tensors without values. So schedules, recomputation, adapters and new layers are counted
  without formulas of their own; the published formulas (`block_bytes`, `messages`) are tests of the result.
- All micro-batches of a stage send the same, so one is rehearsed and counted as often as there are micro-batches.
- FSDP2 talks to process groups itself, so data parallelism is arithmetic on its units (`data_parallel_traffic`): one line here per
  line of the table in `data_parallel.shard`.
- Bytes that leave a rank are those of ring algorithms, which libraries may beat (trees, switches that add): n ranks pass
  2 (n - 1) / n of an all-reduce's tensor, (n - 1) / n of a reduce-scatter's, and n - 1 times what a rank puts into an all-gather.

Legend: S sequence, B micro-batch, H hidden, N ranks of the axis, M micro-batches of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite import comm
from megalite.comm import Record
from megalite.grid import Grid
from megalite.model.gpt import GPTStage
from megalite.optim import collect_parameters, finalize_grads, grad_squares
from megalite.pipeline.lowering import Program
from megalite.pipeline.p2p import Edge
from megalite.pipeline.runtime import PipelineRuntime, splits_backward
from megalite.planner.plan import BuildStage
from megalite.planner.rehearsal import BatchShape, give_memory, rehearse
from megalite.planner.states import ParameterShape, Sharding
from megalite.tensor_parallel.deferral import WeightGradQueue

__all__ = ["Traffic", "block_bytes", "data_parallel_traffic", "messages", "rehearse_traffic", "ring_bytes", "total_traffic"]


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All calls of one operation over one axis in a step. nbytes: of the tensors that go in; sent: that leave the rank, in a ring."""

    axis: str
    op: str
    calls: int
    nbytes: int
    sent: int


def ring_bytes(op: str, nbytes: int, size: int) -> int:
    """Bytes that leave a rank of `size`, of an operation that `nbytes` go into (Thakur et al. 2005; the root's share of a broadcast)."""
    if op == "recv" or size == 1:
        return 0
    if op == "all_gather":
        return (size - 1) * nbytes
    if op in ("reduce_scatter", "all_to_all"):
        return (size - 1) * nbytes // size
    if op == "all_reduce":
        return 2 * (size - 1) * nbytes // size
    return nbytes  # send, broadcast


def total_traffic(records: Iterable[Record], sizes: Mapping[str, int]) -> list[Traffic]:
    """Summed by axis and operation, in the order of first use. sizes: {axis: its number of ranks}."""
    found: dict[tuple[str, str], Traffic] = {}
    for record in records:
        key, sent = (record.axis, record.op), ring_bytes(record.op, record.nbytes, sizes[record.axis])
        old = found.get(key, Traffic(axis=record.axis, op=record.op, calls=0, nbytes=0, sent=0))
        found[key] = replace(old, calls=old.calls + 1, nbytes=old.nbytes + record.nbytes, sent=old.sent + sent)
    return list(found.values())


def block_bytes(shape: BatchShape, hidden: int, tp: int, sequence_parallel: bool, itemsize: int) -> int:
    """Bytes that one block's forward and backward of a micro-batch send over tp, without recomputation.

    8 S B H (N - 1) / N elements: four all-reduces (Shoeybi et al. 2019, arXiv:1909.08053), or as many gathers and scatters (Korthikanti
    et al. 2022, arXiv:2205.05198). With sequence parallelism two more gathers, of 2 S B H (N - 1) / N elements together: column-parallel
    layers keep their share of the input and gather it again for the weight gradient.
    """
    tokens = shape.sequence * shape.micro_batch
    return (10 if sequence_parallel else 8) * tokens * hidden * (tp - 1) // tp * itemsize


def messages(program: Program, rank: int) -> tuple[int, int]:
    """(sends, receives) of a rank in a step, from the placement alone: a hidden state and a gradient per micro-batch and border between
    two ranks."""
    borders = [border for border in pairwise(program.schedule.placement) if border[0] != border[1]]
    touching = program.schedule.num_microbatches * sum(rank in border for border in borders)
    return touching, touching


def data_parallel_traffic(parameters: Sequence[ParameterShape], sharding: Sharding, num_microbatches: int) -> list[Traffic]:
    """Of FSDP2, for all stages of a rank: per unit, slices padded to the fullest rank's; see `data_parallel.shard`."""
    ranks, copies = sharding.dp_shard, sharding.dp_replicate
    records: list[Record] = []
    for unit in {parameter.unit: None for parameter in parameters}:
        members = [parameter for parameter in parameters if parameter.unit == unit]
        slices = sum(parameter.slice_numel(ranks) for parameter in members)
        trained = sum(parameter.slice_numel(ranks) for parameter in members if parameter.is_trained)
        if ranks > 1:
            gathers = 2 * num_microbatches if sharding.zero == 3 else 1
            records += gathers * [_record("all_gather", "dp_shard", slices, sharding.compute_itemsize)]
        if ranks > 1 and trained:
            scatters = num_microbatches if sharding.zero >= 2 else 1
            records += scatters * [_record("reduce_scatter", "dp_shard", ranks * trained, sharding.reduce_itemsize)]
        if copies > 1 and trained:
            records.append(_record("all_reduce", "dp_replicate", trained, sharding.reduce_itemsize))
    return total_traffic(records, {"dp_shard": ranks, "dp_replicate": copies})


def _record(op: str, axis: str, numel: int, itemsize: int) -> Record:
    return Record(op, axis, numel, numel * itemsize)


def rehearse_traffic(program: Program, grid: Grid, build: BuildStage, shape: BatchShape) -> list[Record]:
    """Everything that goes through `comm` in a step of `grid.rank`, counted in a dry run.

    Where dp_shard does not divide a parameter's rows, the fullest rank is counted.

    grid: of ranks that do not exist (`Grid.rehearsal`); build(stage, queue): a stage on the meta device over `grid.tp`.
    """
    splits, schedule = splits_backward(program), program.schedule
    numbers = schedule.stages_of(grid.pp.rank)
    with comm.record_comms(grid) as sent:
        _rehearse_messages(program, grid, shape)
    layers: list[Record] = []
    for number in numbers:
        with comm.record_comms(grid) as records:
            rehearse(lambda queue, number=number: build(number, queue), shape, splits_backward=splits)
        layers += schedule.num_microbatches * records
    names = _all_names(build, schedule.num_stages)
    with comm.record_comms(grid) as finishing, FakeTensorMode():
        _rehearse_sums(grid, [build(number, None) for number in numbers], names)
    return [*sent, *layers, *finishing]


def _rehearse_messages(program: Program, grid: Grid, shape: BatchShape) -> None:
    """The program as the runtime runs it, with stages that compute nothing."""
    schedule, queue = program.schedule, WeightGradQueue() if splits_backward(program) else None

    def stand_in(x: Tensor | None, batch: Any, *, is_last: bool) -> Tensor:
        x = torch.empty(shape.edge, dtype=shape.dtype).requires_grad_() if x is None else x
        return x.float().sum() if is_last else x * 1

    with FakeTensorMode():
        edge = Edge(shape.edge, shape.dtype, torch.device("cpu"))
        stages = {
            number: lambda x, batch, is_last=number == schedule.num_stages - 1: stand_in(x, batch, is_last=is_last)
            for number in schedule.stages_of(grid.pp.rank)
        }
        runtime = PipelineRuntime(stages, grid.pp, edge, weight_grads=queue)
        runtime.train_step(program, [None] * schedule.num_microbatches, torch.ones(()))


def _rehearse_sums(grid: Grid, stages: Sequence[GPTStage], names: Sequence[str]) -> None:
    """What a step adds up outside of its passes: tokens, parts of gradients, the norm, the loss (`training.loop.train_step`)."""
    for stage in stages:
        give_memory(stage, torch.float32)
        _cut(stage, grid.dp_shard.size)
    parameters = collect_parameters(stages)
    scalar = torch.zeros(())
    comm.all_reduce(scalar, grid.dp)
    finalize_grads(parameters, grid)
    grad_squares(parameters, names, grid)
    comm.all_reduce(comm.all_reduce(scalar, grid.dp), grid.pp)


def _cut(stage: nn.Module, ranks: int) -> None:
    """Leave every parameter the rows that the first of `ranks` holds of it after a step's last reduction."""
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() > 0:
                rows = torch.empty(-(-parameter.shape[0] // ranks), *parameter.shape[1:])
                cut = nn.Parameter(rows, requires_grad=parameter.requires_grad)
                cut.grad = torch.empty_like(rows) if parameter.requires_grad else None
                module._parameters[name] = cut


def _all_names(build: BuildStage, num_stages: int) -> list[str]:
    """Logical names of the trained parameters of all stages, sorted."""
    with FakeTensorMode():
        stages = [build(number, None) for number in range(num_stages)]
        for stage in stages:
            give_memory(stage, torch.float32)
        names = [parameter.name for stage in stages for parameter in collect_parameters([stage]) if not parameter.is_copy]
    return sorted(names)
