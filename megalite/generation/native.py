"""Decoding steps in C++ (`csrc/decode.cpp`), for a whole model on a CPU.

Decisions
- Used where it was built and the model is what it knows: all of the model on one rank, in fp32 or bf16 on the CPU. Otherwise torch
  computes the same (`layers`). Nothing depends on which of them it was but the order of sums.
- The C++ side is given addresses; the tensors behind them are kept here. Weights are not copied, so it reads what the model holds.
- With bf16 weights, activations are fp32: they are few, and the weights are what takes the time.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.generation.cache import Cache
from megalite.generation.layers import Layer
from megalite.model import GPTStage

try:
    from megalite import _decode  # type: ignore[attr-defined]
except ImportError:
    _decode = None

if TYPE_CHECKING:
    Rotations = tuple[Tensor, Tensor]

__all__ = ["NativeSteps", "is_built"]

_WEIGHT_TYPES = (torch.float32, torch.bfloat16)


def is_built() -> bool:
    """Whether the extension is there."""
    return _decode is not None


class NativeSteps:
    """Steps of one model. layers, head: as the decoder uses them. Threads are as many as torch has when this is made."""

    def __init__(self, stage: GPTStage, layers: Sequence[Layer], head: Tensor) -> None:
        assert _decode is not None and self.fits(stage), "ask `fits` first"
        config = stage.config
        self._kept: list[Tensor] = []
        self._dtype, self.num_threads = head.dtype, torch.get_num_threads()
        self._vocab = head.shape[0]
        self._tables: tuple[Any, Tensor, Tensor] | None = None
        centred = config.normalization == "LayerNorm"
        sizes = _sizes(config, head.shape[0])
        self._stepper = _decode.Stepper(_name(head.dtype), sizes, config.activation, centred, config.norm_epsilon, self.num_threads)
        for layer in layers:
            self._stepper.add_layer(self._addresses(_layer_tensors(layer)))
        assert stage.embedding is not None and stage.head is not None
        position = None if stage.embedding.position is None else stage.embedding.position.weight
        word = stage.embedding.word.weight.detach()
        ends = {"word": word, "head": head, "position": position, **_norm_tensors("norm", stage.head.norm)}
        self._stepper.set_ends(self._addresses(ends))

    @staticmethod
    def fits(stage: GPTStage) -> bool:
        """Whether C++ can do this model's steps here."""
        parameters = list(stage.parameters())
        is_whole = stage.embedding is not None and stage.head is not None and stage.ctx.tp.size == 1
        kinds = {(parameter.dtype, parameter.device.type) for parameter in parameters}
        return _decode is not None and is_whole and len(kinds) == 1 and kinds <= {(dtype, "cpu") for dtype in _WEIGHT_TYPES}

    def step(self, cache: Cache, tokens: Sequence[int], rotations: Rotations | None) -> Tensor:
        """Logits [B, V] after one more token in every row, whose keys and values are stored; lengths are the caller's."""
        logits = torch.empty(len(tokens), self._vocab)
        cos, sin = self._half_tables(rotations)
        name = "int8" if cache.is_int8 else _name(cache.dtype)
        scales = zip(cache.key_scales, cache.value_scales, strict=True) if cache.is_int8 else [(None, None)] * len(cache.keys)
        parts = [
            (k.data_ptr(), v.data_ptr(), _address(ks), _address(vs))
            for k, v, (ks, vs) in zip(cache.keys, cache.values, scales, strict=True)
        ]
        where = (_address(cos), _address(sin), logits.data_ptr())
        self._stepper.step(list(tokens), cache.lengths[: len(tokens)], name, parts, cache.shape.slots, *where)
        return logits

    def _half_tables(self, rotations: Rotations | None) -> tuple[Tensor | None, Tensor | None]:
        """cos and sin of the first half of the turned channels, contiguous."""
        if rotations is None:
            return None, None
        if self._tables is None or self._tables[0] is not rotations:
            half = rotations[0].shape[1] // 2
            self._tables = rotations, rotations[0][:, :half].contiguous(), rotations[1][:, half:].contiguous()
        return self._tables[1:]

    def _addresses(self, tensors: dict[str, Tensor | None]) -> dict[str, int]:
        """Matrices in the model's type, all else in fp32."""
        found = {}
        for name, tensor in tensors.items():
            if tensor is not None:
                is_matrix = name in ("qkv", "out", "up", "down", "word", "head")
                tensor = tensor.detach() if is_matrix else tensor.detach().float()
                assert tensor.is_contiguous() and (tensor.dtype == self._dtype or not is_matrix)
                self._kept.append(tensor)
            found[name] = _address(tensor)
        return found


def _sizes(config: ModelConfig, vocab: int) -> dict[str, int]:
    return {
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "groups": config.num_kv_heads,
        "head_dim": config.head_dim,
        "half": config.rotary_dim // 2,
        "ffn": config.ffn_size,
        "vocab": vocab,
        "window": config.sliding_window or 0,
    }


def _layer_tensors(layer: Layer) -> dict[str, Tensor | None]:
    attention = layer.attention
    return {
        **_norm_tensors("attention_norm", layer.block.attention_norm),
        **_norm_tensors("mlp_norm", layer.block.mlp_norm),
        "qkv": layer.qkv.weights[0],
        "qkv_bias": layer.qkv.biases[0],
        "q_norm": None if attention.q_norm is None else attention.q_norm.weight,
        "k_norm": None if attention.k_norm is None else attention.k_norm.weight,
        "out": layer.out,
        "out_bias": layer.out_bias,
        "up": layer.up.weights[0],
        "up_bias": layer.up.biases[0],
        "down": layer.down,
        "down_bias": layer.down_bias,
    }


def _norm_tensors(name: str, norm: nn.Module) -> dict[str, Tensor | None]:
    return {name: norm.weight, f"{name}_bias": getattr(norm, "bias", None)}  # type: ignore[dict-item]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
