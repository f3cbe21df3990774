"""Which tensors of a Megatron-core checkpoint make which of ours, and back.

Decisions
- Both spellings of norms are accepted: the local one and Transformer Engine's, where a norm belongs to the linear layer behind it.
- Megatron keeps q, k and v in one matrix: for every key/value head its query heads, then k, then v. Gate and up are one matrix too, the
  gate above.
- Channels turn in halves here. Where they turn in pairs there (`rotary_interleaved`), rows of q and k are put in our order.

Letters: H hidden, N query heads, K key/value heads, D head size, R rotated channels of a head.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config import ModelConfig

__all__ = ["MegatronPart", "Rows", "join", "part_of"]

_ENDS = {
    "embedding.word.weight": "embedding.word_embeddings.weight",
    "embedding.position.weight": "embedding.position_embeddings.weight",
    "head.norm.weight": "decoder.final_layernorm.weight",
    "head.norm.bias": "decoder.final_layernorm.bias",
    "head.output.weight": "output_layer.weight",
}
_NORMS = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_{kind}", "input_layernorm.{kind}"),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_{kind}", "pre_mlp_layernorm.{kind}"),
    "attention.q_norm": ("self_attention.q_layernorm.{kind}",),
    "attention.k_norm": ("self_attention.k_layernorm.{kind}",),
}
_LINEARS = {
    **{f"attention.{part}_proj": ("self_attention.linear_qkv.{kind}", part) for part in "qkv"},
    "attention.o_proj": ("self_attention.linear_proj.{kind}", None),
    "mlp.gate_proj": ("mlp.linear_fc1.{kind}", "gate"),
    "mlp.up_proj": ("mlp.linear_fc1.{kind}", "up"),
    "mlp.down_proj": ("mlp.linear_fc2.{kind}", None),
}


@dataclass(frozen=True)
class MegatronPart:
    """Where one of our tensors is: spellings of the tensor (the first is written), and which of its rows (None: all)."""

    spellings: tuple[str, ...]
    rows: str | None = None
    is_norm_weight: bool = False


@dataclass(frozen=True)
class Rows:
    """How rows lie in Megatron's matrices. turns_in_pairs: rotated channels are neighbours there."""

    heads: int
    kv_heads: int
    head_dim: int
    rotated: int
    turns_in_pairs: bool = False

    @classmethod
    def of(cls, model: ModelConfig, *, turns_in_pairs: bool = False) -> Rows:
        return cls(model.num_attention_heads, model.num_kv_heads, model.head_dim, model.rotary_dim, turns_in_pairs)

    def take(self, theirs: Tensor, rows: str | None) -> Tensor:
        """Our tensor from the joint one: `rows` is q, k, v, gate, up, or None for all of it."""
        if rows is None:
            return theirs
        if rows in ("gate", "up"):
            return theirs.chunk(2)[rows == "up"]
        each = self.heads // self.kv_heads
        groups = theirs.unflatten(0, (self.kv_heads, each + 2, self.head_dim))
        begin, count = {"q": (0, each), "k": (each, 1), "v": (each + 1, 1)}[rows]
        taken = groups[:, begin : begin + count].flatten(0, 1)  # heads, D, ...
        return (self._turned(taken) if rows != "v" else taken).flatten(0, 1)

    def join_qkv(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The joint matrix or bias, in groups; for channels that turn in halves."""
        assert not self.turns_in_pairs, "what is written turns in halves"
        parts = (y.unflatten(0, (self.kv_heads, -1)) for y in (q, k, v))
        return torch.cat(list(parts), dim=1).flatten(0, 1)

    def halved(self, value: Tensor) -> Tensor:
        """q or k by itself ([heads x D, ...]), with rotated channels in halves."""
        return self._turned(value.unflatten(0, (-1, self.head_dim))).flatten(0, 1)

    def _turned(self, heads: Tensor) -> Tensor:
        if not self.turns_in_pairs:
            return heads
        turning, rest = heads[:, : self.rotated], heads[:, self.rotated :]
        halves = turning.unflatten(1, (self.rotated // 2, 2)).transpose(1, 2).flatten(1, 2)
        return torch.cat([halves, rest], dim=1)


def part_of(name: str, *, is_gated: bool) -> MegatronPart:
    """name: our logical name without "model."; is_gated: the MLP has a gate."""
    if name in _ENDS:
        return MegatronPart((_ENDS[name],), is_norm_weight=name == "head.norm.weight")
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found is not None, f"Megatron has no place for {name}"
    layer, part, kind = found.groups()
    if part in _NORMS:
        ends, rows, is_norm_weight = _NORMS[part], None, kind == "weight"
    else:
        end, rows = _LINEARS[part]
        ends, is_norm_weight = (end,), False
        rows = rows if is_gated or rows != "up" else None
    return MegatronPart(tuple(f"decoder.layers.{layer}.{end.format(kind=kind)}" for end in ends), rows, is_norm_weight)


def join(parts: dict[str | None, Tensor], rows: Rows) -> Tensor:
    """The tensor as Megatron has it, from ours by their rows."""
    if None in parts:
        return parts[None]
    if "q" in parts:
        return rows.join_qkv(parts["q"], parts["k"], parts["v"])
    return torch.cat([parts["gate"], parts["up"]])
