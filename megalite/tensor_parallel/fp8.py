"""Matrix products of linear layers in fp8, by torchao: forward, dx and dW, with scales computed from the values themselves.

Decisions
- The product is torchao's `Float8Linear`, called with our local weight; a layer that has none (`ParallelContext.product`)
  pays nothing. Embedding, head, attention scores and norms stay in the type of the computation.
- The collectives stay in that type too, and are those of `mappings`: they wait where `linear` overlaps them.
- Scales belong to local tensors (one per tensor, or one per row), so numbers depend on tp and the micro-batch a little
  more than in other types.
- With a queue (`deferral`) dW is computed in I and added in W: torchao has one backward.
- GPUs multiply fp8 matrices whose sizes are multiples of 16; `validate_training.fp8_violations` looks.

Legend: S sequence, B micro-batch, I in features, O out features.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megalite.errors import ConfigError
from megalite.grid import Axis
from megalite.tensor_parallel.deferral import WeightGradQueue, add_later
from megalite.tensor_parallel.mappings import copy_to_tp, gather_from_sp, reduce_from_tp, reduce_scatter_to_sp
from megalite.tensor_parallel.quantized import Int8Weight

__all__ = ["Product", "column_parallel_product", "fp8_product", "later_weight", "row_parallel_product"]

Product = Callable[[Tensor, Any], Tensor]
"""(x [..., I], weight [O, I]) -> x @ weight.T [..., O]; autograd differentiates it. The weight is a tensor, or integers (`quantized`)."""

_LEAST_CAPABILITY = (8, 9)


def fp8_product(recipe: str, device: torch.device) -> Product:
    """The product of torchao's recipe "tensorwise" or "rowwise".

    Raises ConfigError without torchao, and on a device that has no fp8 matrix products.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        found = "the CPU" if device.type != "cuda" else f"{torch.cuda.get_device_name(device)}"
        raise ConfigError(
            f"fp8 {recipe} needs an NVIDIA GPU of compute capability 8.9 or more, and this rank is on {found}: leave out --fp8"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError(f"fp8 {recipe} needs torchao, which is not installed: pip install 'megalite[fp8]', or leave out --fp8")
    return torchao_product(recipe)


def torchao_product(recipe: str) -> Product:
    """As `fp8_product`, on any device that torch has such a product for (CPUs too, for tests)."""
    from torchao.float8 import Float8LinearConfig  # pyright: ignore[reportMissingImports]
    from torchao.float8.float8_linear import Float8Linear  # pyright: ignore[reportMissingImports]

    empty = nn.Linear(1, 1, bias=False, device="meta")
    module = Float8Linear.from_float(empty, config=Float8LinearConfig.from_recipe_name(recipe))
    return lambda x, weight: functional_call(module, {"weight": weight}, (x,))


def column_parallel_product(
    x: Tensor,
    weights: Sequence[Tensor | Int8Weight],
    biases: Sequence[Tensor | None],
    tp: Axis,
    sequence_parallel: bool,
    queue: WeightGradQueue | None,
    product: Product,
) -> tuple[Tensor, ...]:
    """`linear.column_parallel` with another product."""
    whole = gather_from_sp(x, tp) if sequence_parallel else copy_to_tp(x, tp)
    return tuple(_plus(product(whole, later_weight(weight, queue)), bias, queue) for weight, bias in zip(weights, biases, strict=True))


def row_parallel_product(
    x: Tensor,
    weight: Tensor | Int8Weight,
    bias: Tensor | None,
    tp: Axis,
    sequence_parallel: bool,
    queue: WeightGradQueue | None,
    product: Product,
) -> Tensor:
    """`linear.row_parallel` with another product."""
    part = product(x, later_weight(weight, queue))
    whole = reduce_scatter_to_sp(part, tp) if sequence_parallel else reduce_from_tp(part, tp)
    return _plus(whole, bias, queue)


def later_weight(weight: Tensor | Int8Weight, queue: WeightGradQueue | None) -> Tensor | Int8Weight:
    """`add_later`; integers have no gradient."""
    return weight if isinstance(weight, Int8Weight) else add_later(weight, queue)


def _plus(y: Tensor, bias: Tensor | None, queue: WeightGradQueue | None) -> Tensor:
    return y if bias is None else y + add_later(bias, queue)
