"""What one stage keeps and needs for one micro-batch, found by running its code on tensors without values.

Decisions
- The real stage runs forward and backward on fake tensors (shapes and storages, no memory, no arithmetic) over a tp axis of ranks
  that do not exist. So every setting, recomputation and new kind of layer is in the prediction without a formula of its own; the
  published formulas are tests of the result.
- The fake tensors say that they are on the CPU whatever the target: a build of torch without CUDA cannot rehearse on cuda. What is
  kept is the same on both, but for attention in fp32 with grouped heads on GPUs, where torch repeats the heads; and the caller must
  set the loss's pieces, whose size depends on the device.
- Data parallelism is not rehearsed: what it adds per unit is arithmetic (`states`).

Legend: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import get_gradient_edge

from megalite.data.batch import MicroBatch
from megalite.model.gpt import GPTStage
from megalite.planner.live_storages import LiveStorages
from megalite.planner.walk import StageMemory
from megalite.tensor_parallel.deferral import WeightGradQueue

__all__ = ["BatchShape", "give_memory", "rehearse"]


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """edge: hidden states between stages, [S_local, B, H]; dtype: of the computation."""

    sequence: int
    micro_batch: int
    edge: tuple[int, int, int]
    dtype: torch.dtype

    @property
    def edge_bytes(self) -> int:
        return self.edge[0] * self.edge[1] * self.edge[2] * self.dtype.itemsize


def rehearse(build: Callable[[WeightGradQueue | None], GPTStage], shape: BatchShape, *, splits_backward: bool) -> StageMemory:
    """build: gives the stage on the meta device, with layers that defer weight gradients to the queue, if there is one."""
    queue = WeightGradQueue() if splits_backward else None
    stage = build(queue)
    with FakeTensorMode():
        give_memory(stage, shape.dtype)
        batch, x = _batch(shape), None
        if stage.head is not None and stage.head.is_of_preferences:
            batch = replace(batch, reference=torch.zeros(shape.micro_batch))
        with LiveStorages(_tensors(stage)) as live:
            before = live.current()
            if stage.embedding is None:
                x = torch.empty(shape.edge, dtype=shape.dtype).requires_grad_()
            out = stage(x, batch)
            is_last = stage.head is not None
            gradient = torch.ones_like(out) if is_last else None
            edge = get_gradient_edge(out / torch.ones(()) if is_last else out)
            del out
            forward_rise, kept = live.peak - before, live.current() - before
            start = live.reset_peak()
            gradient = torch.empty(shape.edge, dtype=shape.dtype) if gradient is None else gradient
            if queue is None:
                torch.autograd.backward([edge], [gradient])
                return StageMemory(kept=kept, deferred=0, forward_rise=forward_rise, backward_rise=live.peak - start, weight_rise=0)
            with queue.collect() as waiting:
                torch.autograd.backward([edge], [gradient])
            backward_rise = live.peak - start
            del x, edge, gradient
            deferred, start = live.current() - before, live.reset_peak()
            waiting.run()
            return StageMemory(
                kept=kept,
                deferred=deferred,
                forward_rise=forward_rise,
                backward_rise=backward_rise,
                weight_rise=live.peak - start,
            )


def give_memory(stage: nn.Module, dtype: torch.dtype) -> None:
    """Weights of the computation's type, and gradients, so that passes add to what is there."""
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weight = nn.Parameter(torch.empty(parameter.shape, dtype=dtype), requires_grad=parameter.requires_grad)
                weight.grad = torch.empty_like(weight) if weight.requires_grad else None
                module._parameters[name] = weight
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _tensors(stage: nn.Module) -> list[Tensor]:
    parameters = list(stage.parameters())
    return [*parameters, *stage.buffers(), *(parameter.grad for parameter in parameters if parameter.grad is not None)]


def _batch(shape: BatchShape) -> MicroBatch:
    tokens = torch.zeros((shape.micro_batch, shape.sequence), dtype=torch.int64)
    mask = torch.ones(tokens.shape)
    return MicroBatch(tokens=tokens, labels=tokens, loss_mask=mask, position_ids=tokens, first_sample=0)
