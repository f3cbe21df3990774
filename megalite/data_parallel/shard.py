"""Wraps a stage for data parallelism. FSDP2 (`fully_shard`) is the engine of every strategy, and used only here.

Per unit and step with M micro-batches, "cut" meaning: each dp_shard rank has a slice of dimension 0.

    zero                  master weights, Adam  gradients  gathered weights      collectives over dp
    0 no_shard            whole                 whole      kept for the step     1 all-reduce at the last backward
    1 optim               cut                   whole      kept for the step     1 all-gather at the first forward,
                                                                                 1 reduce-scatter at the last backward
    2 optim_grads         cut                   cut        kept for the step     1 all-gather, M reduce-scatters
    3 optim_grads_params  cut                   cut        for one forward or    2 M all-gathers, M reduce-scatters
                                                           backward at a time
    With dp_replicate > 1, strategies 1 to 3 work inside dp_shard, and 1 all-reduce at the last backward sums the slices
    over dp_replicate.

Decisions
- Gradients are summed, never averaged: the loss has been divided by the global number of tokens already. A divide
  factor of 1 and plain sums on every backend (gloo has no pre-multiplied sum).
- Each unit is one communication group. Units do not depend on the pipeline split, so neither does the order in which
  numbers are added.
- Master weights, their gradients and, by default, all reductions are fp32. With compute_dtype bf16 the weights are cast
  when they are gathered, and gradients that wait for the last micro-batch wait in fp32.
- With reduce_dtype bf16 every sum over ranks rounds to 8 bits, and strategies 0 and 1 add up a rank's micro-batches in
  bf16 too: FSDP2 keeps them in the type that it will reduce. Gradients that have been reduced are fp32 again. A lone
  rank reduces nothing and stays in fp32.
- One rank in fp32 is not wrapped at all. One rank in bf16 is: the wrapper makes the bf16 copies.
- An evaluation's forward drops what it has gathered. Otherwise gathered weights would outlive an optimizer step: FSDP2
  does not look whether the slices have changed since. After training the last backward drops them (`GradientSync`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from megalite.grid import Grid

__all__ = ["drop_gathered", "shard_stage", "sharded_modules"]


def shard_stage(
    stage: nn.Module,
    units: Sequence[tuple[str, nn.Module]],
    grid: Grid,
    *,
    zero: int,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype = torch.float32,
    materialize: Callable[[str, nn.Module], None],
) -> None:
    """Materialise and wrap `stage` in place, one unit after another, so that no rank ever holds all of it whole.

    units: (dotted name, module) pairs in order of use; they do not overlap. Parameters outside of them are gathered
    around the whole stage's forward and backward. Modules are run by calling them, and their results are not views.
    reduce_dtype: of the sums over ranks; fp32, or bf16 for half the traffic.
    materialize(prefix, module): gives the module's parameters that are still on the meta device memory and values, and
    touches no other; prefix is the module's dotted name and a ".", or "" for the stage.
    """
    assert zero in (0, 1, 2, 3), f"there is no ZeRO stage {zero}"
    assert zero > 0 or grid.dp_shard.size == 1, "without sharding all data-parallel ranks are replicas"
    wrapped = grid.dp.size > 1 or compute_dtype != torch.float32
    settings: dict[str, Any] = {
        "mesh": _mesh(grid),
        "reshard_after_forward": zero == 3,
        # Inputs keep their type: activations have the compute type already, and a loss mask must not get it.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=compute_dtype,
            reduce_dtype=reduce_dtype if grid.dp.size > 1 else torch.float32,
            cast_forward_inputs=False,
        ),
    }
    for prefix, module in [*((f"{name}.", unit) for name, unit in units), ("", stage)]:
        materialize(prefix, module)
        if wrapped:
            fully_shard(module, **settings)
    for module in sharded_modules(stage):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    if wrapped:
        _prefetch_in_backward(stage, [unit for _, unit in units])
        stage.register_forward_hook(_drop_after_evaluation)


def _mesh(grid: Grid) -> DeviceMesh:
    if grid.dp_replicate.size == 1:
        return grid.mesh["dp_shard"]
    return grid.mesh["dp_replicate", "dp_shard"]


def _prefetch_in_backward(stage: nn.Module, units: Sequence[nn.Module]) -> None:
    """Before its backward each unit has the one that comes next gathered; the first names itself, which does nothing.

    Left alone, FSDP2 takes the unit whose forward ran just before. With several micro-batches that is, for the first
    unit, the last one of another micro-batch: a gather of the head that nobody uses.
    """
    for target, unit in zip([*units[:1], *units], [*units, stage], strict=False):
        assert isinstance(unit, FSDPModule)
        assert isinstance(target, FSDPModule)
        unit.set_modules_to_backward_prefetch([target])


def sharded_modules(stage: nn.Module) -> list[FSDPModule]:
    """The stage itself and its units; none where it is not wrapped."""
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def drop_gathered(stage: nn.Module) -> None:
    """Free gathered weights. The next use gathers again; must not be called between a forward and its backward."""
    for module in sharded_modules(stage):
        module.reshard()


def _drop_after_evaluation(stage: nn.Module, _args: Any, _output: Any) -> None:
    if not torch.is_grad_enabled():
        drop_gathered(stage)
