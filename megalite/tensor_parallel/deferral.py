"""Weight gradients that wait: the second half of a backward pass that a schedule has split in two.

    I   backward pass to the inputs; what is needed for weight gradients is put in a queue
    W   the queued gradients are computed and added to the parameters

Decisions
- The unit that waits is a closure over the layer's input and output gradient, put there by the layer's own backward. All
  else of a micro-batch's graph is freed by I.
- Matrices and embedding tables are computed in W. Vectors of norms come out of the same kernel as the input gradient:
  they are computed in I, and added in W.
- W adds through autograd, from the place in the graph of the local tensor that the layer used back to its parameter, so
  whatever lies between the two (DTensor, a slice of key/value rows) is the same code in both kinds of backward. That
  place, not the tensor, is what a layer remembers: a saved tensor may come back as a recomputed one, without a graph.
- Several uses of one parameter (a tied table) are handed over together: autograd adds them to one another before it adds
  them to the parameter's gradient, as it does in a whole backward. So W's sums have the same bits.
- The queue belongs to a rank and is passed by hand; without one a layer cannot defer and pays nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["DeferredGrads", "WeightGradQueue", "add_later", "deferrable_embedding", "gradient_target"]

Compute = Callable[[], Sequence[Tensor | None]]


def gradient_target(weight: Tensor | None) -> GradientEdge | None:
    """Where the gradient of a tensor goes that a layer uses; None where none is wanted."""
    return get_gradient_edge(weight) if weight is not None and weight.requires_grad else None


class DeferredGrads:
    """The weight gradients of one micro-batch on one stage, not yet computed."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[GradientEdge | None, ...], Compute]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, targets: Sequence[GradientEdge | None], compute: Compute) -> None:
        """compute() gives one gradient per target (None: nothing to add); targets lead to parameters through autograd."""
        self._entries.append((tuple(targets), compute))

    @torch.no_grad()
    def run(self) -> None:
        """Compute everything and add it to the parameters, oldest entry first; each entry is freed as it is done."""
        self._entries.reverse()
        uses = Counter(id(_leaf(target)) for targets, _ in self._entries for target in targets if target is not None)
        waiting: dict[int, list[tuple[GradientEdge, Tensor]]] = {}
        while self._entries:
            targets, compute = self._entries.pop()
            for target, grad in zip(targets, compute(), strict=True):
                if target is None or grad is None:
                    continue
                key = id(_leaf(target))
                waiting.setdefault(key, []).append((target, grad))
                uses[key] -= 1
                if uses[key] == 0:
                    edges, grads = zip(*waiting.pop(key), strict=True)
                    torch.autograd.backward(edges, grads)
        assert not waiting, "a gradient was promised and not computed"


def _leaf(target: GradientEdge) -> Tensor:
    """The parameter behind a place in the graph; what lies between has one input each."""
    node: Any = target.node
    while node.next_functions:
        node = node.next_functions[0][0]
    return node.variable


class WeightGradQueue:
    """Where layers put weight gradients while an input-gradient pass runs. One per rank."""

    def __init__(self) -> None:
        self._open: DeferredGrads | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @contextmanager
    def collect(self) -> Iterator[DeferredGrads]:
        """Backward passes inside are input-gradient passes; what they leave for later is in the value."""
        assert self._open is None, "one input-gradient pass at a time"
        self._open = deferred = DeferredGrads()
        try:
            yield deferred
        finally:
            self._open = None

    def put(self, targets: Sequence[GradientEdge | None], compute: Compute) -> None:
        assert self._open is not None, "nothing is collected outside an input-gradient pass"
        self._open.put(targets, compute)


def add_later(weight: Tensor, queue: WeightGradQueue | None) -> Tensor:
    """`weight` for a layer whose kernel gives its gradient with the input's: an input-gradient pass adds it in W."""
    return weight if queue is None else _AddLater.apply(weight, queue)  # type: ignore[return-value]


class _AddLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.queue, ctx.target = queue, gradient_target(weight)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.queue.is_open:
            return grads[0], None
        ctx.queue.put((ctx.target,), lambda: grads)
        return None, None


def deferrable_embedding(tokens: Tensor, weight: Tensor, queue: WeightGradQueue | None) -> Tensor:
    """Rows of `weight` [V, H] for int64 `tokens` [...] -> [..., H]; with a queue its gradient can wait for W."""
    return F.embedding(tokens, weight) if queue is None else _Embedding.apply(tokens, weight, queue)  # type: ignore[return-value]


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, queue: WeightGradQueue) -> Tensor:
        ctx.queue, ctx.target, ctx.num_rows = queue, gradient_target(weight), weight.shape[0]
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        num_rows, dy = ctx.num_rows, grads[0]

        def compute() -> tuple[Tensor]:
            # the operator that the backward of F.embedding calls
            return (torch.ops.aten.embedding_dense_backward(dy, tokens, num_rows, -1, False),)

        if ctx.queue.is_open:
            ctx.queue.put((ctx.target,), compute)
            return None, None, None
        return None, compute()[0], None
