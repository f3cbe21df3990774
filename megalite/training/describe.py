"""What a run says about itself at the start, and the check that its stages add up to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megalite import comm
from megalite.log import get_logger
from megalite.model.adapters import quantized_layers
from megalite.optim import collect_parameters

if TYPE_CHECKING:
    from megalite.training.setup import Run

__all__ = ["describe"]


def describe(run: Run) -> None:
    """Log sizes, layout, schedule and weight decay; no layer may be lost. Collective over pp."""
    config, shape, train = run.config, run.grid.shape, run.config.train
    counted = [run.optimizer.group_counts["decay"], run.optimizer.group_counts["no_decay"], _frozen_and_adapters(run)]
    counts = comm.all_reduce(torch.tensor(counted, device=run.grid.device), run.grid.pp)
    (decayed, decayed_size), (others, others_size), (frozen_size, adapter_size) = counts.tolist()
    trained_size = decayed_size + others_size
    total, expected = trained_size + frozen_size - adapter_size, config.model.num_parameters()
    assert total == expected, f"the stages hold {total} parameters, the model has {expected}"
    schedule = next(iter(run.train_programs.values())).schedule.name
    ranks = _counted(run.grid.world_size, "rank")
    microbatches = _counted(run.eval_program.schedule.num_microbatches, "micro-batch", "es")
    place = f"{config.numerics.precision} on {run.grid.device.type}"
    get_logger().info(
        f"{total:,} parameters | {ranks} = tp {shape.tp} x pp {shape.pp} x dp {shape.dp} (zero {config.zero}) | "
        f"{schedule}, {microbatches} of {train.micro_batch_size} x {config.data.seq_length} | {place}"
    )
    if frozen_size:
        share, size = 100 * trained_size / (trained_size + frozen_size), 4 * trained_size / 1e6
        get_logger().info(
            f"trained: {trained_size:,} parameters of adapters, {share:.3g} % of all, {size:,.3g} MB in fp32; the rest is frozen"
        )
    _describe_optimizer(run)
    decay = config.optim.weight_decay
    get_logger().info(f"weight decay {decay:g} on {decayed} tensors ({decayed_size:,} elements), none on {others} ({others_size:,})")


def _frozen_and_adapters(run: Run) -> tuple[int, int]:
    """Elements of this rank's frozen parameters, and of those that are adapters; copies do not count."""
    frozen = collect_parameters(run.stages.values(), trained=False)
    layers = [layer for stage in run.stages.values() for layer in quantized_layers(stage).values()]
    integers = sum(layer.in_features * layer.out_features for layer in layers)
    return (
        sum(parameter.num_elements for parameter in frozen if not parameter.is_copy) + integers,
        sum(parameter.num_elements for parameter in run.parameters if ".adapter." in parameter.name),
    )


def _describe_optimizer(run: Run) -> None:
    """One line for each combination of rule and factors, where there is more than AdamW's decay. Collective over pp."""
    optim = run.config.optim
    if optim.optimizer == "adam" and not optim.lr_multipliers and not optim.weight_decay_multipliers:
        return
    totals: dict[str, list[int]] = {}
    for counts in comm.all_gather_object(run.optimizer.setting_counts, run.grid.pp):
        for label, (number, elements) in counts.items():
            total = totals.setdefault(label, [0, 0])
            total[0] += number
            total[1] += elements
    for label, (number, elements) in sorted(totals.items()):
        get_logger().info(f"{label}: {_counted(number, 'tensor')} ({elements:,} elements)")


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" + ("" if number == 1 else plural)
