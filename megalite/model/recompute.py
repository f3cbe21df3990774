"""What a block keeps for its backward pass, computes again, or moves to the host.

Per block; "again" is what the backward pass repeats before it goes on (a test counts the collectives and the bytes):

| granularity, module    | kept instead of what the part saves     | computed again          | collectives again              |
|------------------------|-----------------------------------------|-------------------------|--------------------------------|
| none                   | everything                              | nothing                 | none                           |
| selective, core_attn   | q, k, v (rotated)                       | softmax attention       | none                           |
| selective, norm        | the norm's input; not its output        | norm                    | none                           |
| selective, mlp_act     | gate and up; not what down_proj is given| activation              | none                           |
| selective, attention   | the norm's output (with norm: its input)| attention but its sum   | all-gather of x (only sp)      |
| selective, mlp         | the norm's output (with norm: its input)| up to down_proj's input | all-gather of x (only sp)      |
| full                   | the block's input [S_local, B, H]       | the block               | all of the forward pass's (1)  |

(1) But for the last sum where hidden dropout is 0: nothing behind it is needed then.

Decisions
- The tool is torch's non-reentrant checkpoint, which keeps a region's inputs and runs it again, once, when the backward
  pass first asks for anything the region has saved, and stops it after the last such tensor. Linear layers save their
  inputs before they sum over tp, so that a region that ends in such a sum does not repeat it.
- Random numbers are keyed (`tensor_parallel/rng`), so no generator's state is kept: the bits are the same.
- A norm's or an activation's output is saved by the layer behind it, outside the region. `droppable` makes this output
  one of the region's own saved tensors, and `forgetting` makes that layer ask the region for it.
- The part that contains another one replaces it: "attention" covers "core_attn", "mlp" covers "mlp_act".
- A region lies inside the block's forward, so data parallelism's hooks, around it, do not run again: with ZeRO 3 the
  backward pass has the block's parameters gathered already, and there is no further gather.
- Where a schedule splits backward passes, the region is computed again in I. W keeps what it keeps without recomputation:
  for each matrix its input and its output's gradient.
- Offloaded tensors are copied on the stream of the computation: it is ordered, but the copies do not overlap with it.

Legend: S sequence (S_local: this rank's share under sequence parallelism, sp), B micro-batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megalite.config_numerics import MemoryConfig

__all__ = ["BlockMemory", "block_memory", "branch", "droppable", "forgetting", "offloading", "recompute"]


@dataclass(frozen=True)
class BlockMemory:
    """How one block is run. modules: of `RECOMPUTE_MODULES`; none are left where the whole block is recomputed."""

    whole_block: bool = False
    modules: frozenset[str] = frozenset()
    offload: bool = False


def block_memory(memory: MemoryConfig, position: int) -> BlockMemory:
    """For the block at `position` (from 0) in its stage."""
    granularity, last = memory.recompute_granularity, memory.recompute_num_layers
    if granularity == "none" or (last is not None and position >= last):
        return BlockMemory(offload=memory.cpu_offloading)
    whole = granularity == "full"
    modules = set() if whole else set(memory.recompute_modules or ("core_attn",))
    for outer, inner in (("attention", "core_attn"), ("mlp", "mlp_act")):
        if outer in modules:
            modules.discard(inner)
    return BlockMemory(whole, frozenset(modules), memory.cpu_offloading)


def recompute(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """function(*inputs), of which only `inputs` are kept for the backward pass; other tensors it uses are not copied."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def branch(memory: BlockMemory, name: str, norm: Callable[[Tensor], Tensor], layer: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
    """layer(norm(x), *args), one branch of a block (`name`: attention or mlp), as `memory` wants it."""
    drops_norm = "norm" in memory.modules
    if name not in memory.modules:
        return layer(droppable(norm, x) if drops_norm else norm(x), *args)
    if drops_norm:
        return recompute(lambda x: layer(norm(x), *args), x)
    return recompute(lambda y: layer(y, *args), norm(x))


class _Tap(torch.autograd.Function):
    """Identity that saves its input. Its place in the graph is how `forgetting` finds that tensor again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_tap = True
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def droppable(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`recompute(function, *inputs)` whose result need not be kept either, by layers that run inside `forgetting`."""
    return recompute(lambda *inputs: _Tap.apply(function(*inputs)), *inputs)  # type: ignore[return-value]


def forgetting(x: Tensor) -> AbstractContextManager[Any]:
    """Layers inside do not keep `x` for their backward pass, if it is `droppable`; nothing is changed if it is not."""
    if not getattr(x.grad_fn, "is_tap", False):
        return nullcontext()
    again = _Again(x)
    return saved_tensors_hooks(again.pack, again.unpack)


@dataclass(frozen=True)
class _Use:
    """One of the ways in which a layer has saved x: a view of its storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Again:
    """Stands for a droppable tensor in the graph. Its region lets it be read once, so it is kept until its last use."""

    def __init__(self, x: Tensor) -> None:
        self._node, self._storage = x.grad_fn, _storage(x)
        self._uses, self._value = 0, None

    def pack(self, tensor: Tensor) -> Tensor | _Use:
        if _storage(tensor) != self._storage:
            return tensor
        self._uses += 1
        return _Use(tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _Use) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if self._value is None:
            (self._value,) = self._node.saved_tensors  # type: ignore[union-attr]
        value, self._uses = self._value, self._uses - 1
        if self._uses == 0:
            self._value = None
        return value.as_strided(packed.size, packed.stride, packed.offset)


def offloading(stay: Iterable[Tensor]) -> _Offload:
    """What is saved inside is kept in host memory, but for tensors that share memory with one of `stay`.

    Any device works; from a GPU the host memory is pinned, and the copies are asynchronous on the current stream. Of a
    tensor that is saved several times there is one copy; the original lives until the end of the `with` block.
    """
    remaining = {_storage(tensor) for tensor in stay}
    copies: dict[tuple, tuple[Tensor, _OnHost]] = {}

    def pack(tensor: Tensor) -> Tensor | _OnHost:
        storage = _storage(tensor)
        if storage in remaining:
            return tensor
        key = (storage, tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.dtype, tensor._version)
        if key not in copies:
            copies[key] = (tensor.detach(), _OnHost(tensor))
        return copies[key][1]

    hooks = _Offload(pack, _OnHost.restore)
    hooks.copies = copies
    return hooks


class _Offload(saved_tensors_hooks):
    copies: dict[tuple, tuple[Tensor, _OnHost]]

    def __enter__(self) -> _Offload:
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self.copies.clear()


class _OnHost:
    """A tensor's values in host memory, and where it was."""

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        self._values = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda, requires_grad=False)
        self._values.copy_(tensor.detach(), non_blocking=True)

    def restore(self: Tensor | _OnHost) -> Tensor:
        """The tensor on its device; one that stayed is returned as it is."""
        return self if isinstance(self, Tensor) else self._values.to(self._device, non_blocking=True)


def _storage(tensor: Tensor) -> int:
    """Which memory a tensor looks at; not its address, which all tensors on the meta device share."""
    return tensor.untyped_storage()._cdata
