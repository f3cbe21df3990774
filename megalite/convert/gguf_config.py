"""What a GGUF file says its model is.

Decisions
- Keys of the architecture that are not known here are errors: they may change what is computed.
- Real numbers are stored in 32 bits; the shortest decimal that they stand for is taken (1e-05, not 9.999999747e-06).
- A head is tied where the file has no `output.weight`, as the readers of the format have it.
- The rows of q and k are in pairs (channel 2i turns with 2i + 1) for `llama`, and in halves for `qwen2` and `qwen3`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from megalite.config import ModelConfig
from megalite.errors import ConfigError

__all__ = ["ARCHITECTURES", "model_from_gguf", "plain"]

ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}
"""{architecture: whether its rotated channels lie in pairs}"""
_SIZES = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "ffn_hidden_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "norm_epsilon": "attention.layer_norm_rms_epsilon",
    "rotary_base": "rope.freq_base",
}
_READ = {
    *_SIZES.values(),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length", "attention.sliding_window"),
}
_NEUTRAL = {"rope.scaling.finetuned"}


def plain(value: Any) -> Any:
    """A 32-bit real number as the decimal that it stands for."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def model_from_gguf(fields: Mapping[str, Any], names: Collection[str]) -> ModelConfig:
    """fields: key to value; names: of the file's tensors. Raises ConfigError with everything that is unknown or missing."""
    kind = fields.get("general.architecture")
    if kind not in ARCHITECTURES:
        raise ConfigError(f"general.architecture {kind!r} cannot be converted; architectures are {', '.join(ARCHITECTURES)}")
    given = {key.removeprefix(f"{kind}."): plain(value) for key, value in fields.items() if key.startswith(f"{kind}.")}
    found = [f"{kind}.{key} ({given[key]!r}) is not known here and might change the computation" for key in given.keys() - _READ - _NEUTRAL]
    found += [f"{kind}.{key} is missing" for key in _SIZES.values() if key not in given]
    if "rope_freqs.weight" in names:
        found.append("rope_freqs.weight holds a scaling of rotary frequencies whose settings the file does not say: convert another format")
    if found:
        raise ConfigError(sorted(found))
    heads = given["attention.head_count"]
    size = given.get("attention.key_length", given["embedding_length"] // heads)
    if given.get("attention.value_length", size) != size:
        raise ConfigError(f"{kind}.attention.value_length {given['attention.value_length']} differs from key_length {size}")
    return ModelConfig(
        **{ours: given[theirs] for ours, theirs in _SIZES.items()},
        num_query_groups=given.get("attention.head_count_kv", heads),
        kv_channels=size,
        vocab_size=given.get("vocab_size", len(fields.get("tokenizer.ggml.tokens", ())) or None),
        normalization="RMSNorm",
        activation="swiglu",
        rotary_percent=given.get("rope.dimension_count", size) / size,
        add_qkv_bias="blk.0.attn_q.bias" in names,
        qk_layernorm="blk.0.attn_q_norm.weight" in names,
        sliding_window=given.get("attention.sliding_window") or None,
        untie_embeddings_and_output_weights="output.weight" in names,
        **_scaling(kind, given),
    )


def _scaling(architecture: str, given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given.get("rope.scaling.type", "none")
    if kind == "none":
        return {}
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{architecture}.rope.scaling.type {kind!r} cannot be computed here: only linear and yarn")
    if "rope.scaling.factor" not in given:
        raise ConfigError(f"{architecture}.rope.scaling.factor is missing")
    fields = {"rope_scaling": kind, "rope_scaling_factor": float(given["rope.scaling.factor"])}
    length = given.get("rope.scaling.original_context_length")
    return fields | ({"rope_scaling_original_length": length} if length else {})
