"""Low-rank adapters as tensors: which layers have them, their shapes, and the weights that they make of a base's.

Decisions
- A layer's merged weight is W + scale * B @ A (LoRA, arXiv:2106.09685); with DoRA (arXiv:2402.09353) its rows are then scaled to the
  trained lengths m. Biases stay as they are. All of it is computed in fp32, whatever is stored.
- A checkpoint of adapters holds nothing else, so one `.adapter.a` says what it is.

Legend: out, in: features of the linear layer; r its rank. Names are logical names without "model.".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.config_lora import LoraConfig
from megalite.convert.writing import logical_shapes

__all__ = ["adapter_shapes", "holds_adapters", "linear_layers", "merged_tensor", "merged_tensors", "merged_weight"]

_WEIGHT = "_proj.weight"


def holds_adapters(names: Iterable[str]) -> bool:
    """Whether tensors with these names are adapters, which need a base."""
    return any(name.endswith(".adapter.a") for name in names)


def linear_layers(model: ModelConfig) -> dict[str, torch.Size]:
    """{layer that may have an adapter: [out, in]}, in the order of the model; `layers.3.attention.q_proj`."""
    return {name.removesuffix(".weight"): shape for name, shape in logical_shapes(model).items() if name.endswith(_WEIGHT)}


def adapter_shapes(lora: LoraConfig, model: ModelConfig) -> dict[str, torch.Size]:
    """{name: shape} of all tensors of the adapters that `lora` gives to `model`."""
    shapes = {}
    for layer, (rows, columns) in linear_layers(model).items():
        rank = lora.rank_of(layer)
        if rank:
            shapes[f"{layer}.adapter.a"] = torch.Size([rank, columns])
            shapes[f"{layer}.adapter.b"] = torch.Size([rows, rank])
            if lora.use_dora:
                shapes[f"{layer}.adapter.magnitude"] = torch.Size([rows])
    return shapes


@torch.no_grad()
def merged_weight(weight: Tensor, a: Tensor, b: Tensor, scale: float, magnitude: Tensor | None = None) -> Tensor:
    """A new fp32 [out, in] from weight [out, in], a [r, in], b [out, r] and with DoRA magnitude [out]; whole tensors."""
    merged = weight.float() + scale * (b.float() @ a.float())
    if magnitude is None:
        return merged
    return merged.mul_((magnitude.float() / merged.norm(dim=1))[:, None])


def merged_tensor(name: str, weight: Tensor, lora: LoraConfig, read: Callable[[str], Tensor]) -> Tensor:
    """The base's tensor `name` with its adapter, in new memory; the tensor itself where it has none.

    read(name): a tensor of the adapters.
    """
    layer = name.removesuffix(".weight")
    if not name.endswith(_WEIGHT) or not lora.rank_of(layer):
        return weight
    magnitude = read(f"{layer}.adapter.magnitude") if lora.use_dora else None
    return merged_weight(weight, read(f"{layer}.adapter.a"), read(f"{layer}.adapter.b"), lora.scale_of(layer), magnitude)


def merged_tensors(base: Mapping[str, Tensor], lora: LoraConfig, adapters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of the model `base` with `adapters`; both, and the result, by logical name."""
    return {name: merged_tensor(name, weight, lora, lambda part: adapters[part]) for name, weight in base.items()}
