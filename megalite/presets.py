"""Named models: published sizes as settings, to start from and to change with flags.

Decisions
- A preset is a mapping of field names to values, so it can only set what flags can set.
- A preset holds what belongs to the model: its shape, its vocabulary and the sequence length it was made for. Only
  `tiny` and `char-gpt`, which are recipes, also set batch and optimizer.
- Published dropout is set where the publication names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megalite.config import RunConfig
from megalite.config_io import assign, suggest
from megalite.errors import ConfigError

__all__ = ["PRESETS", "Preset", "apply_preset"]


@dataclass(frozen=True)
class Preset:
    """One named model: a sentence about it, and the settings it stands for."""

    description: str
    values: Mapping[str, Any]


def _gpt2(name: str, layers: int, hidden: int, heads: int) -> Preset:
    return Preset(
        f"GPT-2 {name}: learned positions, LayerNorm, tanh GELU, biases, tied head",
        {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": 4 * hidden,
            "vocab_size": 50257,
            "max_position_embeddings": 1024,
            "seq_length": 1024,
            "position_embedding_type": "learned_absolute",
            "normalization": "LayerNorm",
            "activation": "gelu_tanh",
            "add_bias_linear": True,
            "untie_embeddings_and_output_weights": False,
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
        },
    )


def _llama_like(name: str, sizes: tuple[int, int, int, int, int], values: Mapping[str, Any]) -> Preset:
    """sizes: layers, hidden size, query heads, key/value heads, ffn."""
    layers, hidden, heads, groups, ffn = sizes
    fields = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "ffn_hidden_size": ffn,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": 1e-5,
        "activation": "swiglu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        **values,
    }
    return Preset(f"{name}: rotary positions, RMSNorm, SwiGLU", {"max_position_embeddings": fields["seq_length"], **fields})


def _llama3(
    name: str, sizes: tuple[int, int, int, int], *, tied: bool = False, stretch: float | None = None, kv_channels: int | None = None
) -> Preset:
    """sizes: layers, hidden size, query heads, ffn; Llama 3 always has 8 key/value heads. stretch: of positions, for 131,072 tokens."""
    layers, hidden, heads, ffn = sizes
    values: dict[str, Any] = {
        "vocab_size": 128256,
        "seq_length": 8192,
        "rotary_base": 500000.0,
        "untie_embeddings_and_output_weights": not tied,
    }
    if stretch is not None:
        values |= {"rope_scaling": "llama3", "rope_scaling_factor": stretch, "rope_scaling_original_length": 8192}
        values |= {"max_position_embeddings": 131072}
    if kv_channels is not None:
        values["kv_channels"] = kv_channels
    return _llama_like(f"Llama {name}", (layers, hidden, heads, 8, ffn), values)


_QWEN2 = {
    "vocab_size": 151936,
    "seq_length": 8192,
    "max_position_embeddings": 32768,
    "rotary_base": 1e6,
    "norm_epsilon": 1e-6,
    "add_qkv_bias": True,
}
_QWEN3 = {
    "vocab_size": 151936,
    "seq_length": 8192,
    "max_position_embeddings": 40960,
    "rotary_base": 1e6,
    "norm_epsilon": 1e-6,
    "kv_channels": 128,
    "qk_layernorm": True,
}

_CHAR_GPT = Preset(
    "character-level GPT for a CPU and a small text: 4 layers of width 128, context 64 (vocabulary from the data)",
    {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 512,
        "seq_length": 64,
        "max_position_embeddings": 64,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": "gelu",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": False,
        "micro_batch_size": 12,
        "global_batch_size": 12,
        "train_iters": 2000,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_warmup_iters": 100,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "clip_grad": 1.0,
    },
)

_TINY = Preset(
    "a Llama of 4 layers and width 64 for trying layouts: every size divides by 2 and 4; 257 byte-level tokens",
    {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 192,
        "vocab_size": 257,
        "seq_length": 64,
        "global_batch_size": 8,
        "train_iters": 20,
        "lr": 1e-3,
    },
)

PRESETS: Mapping[str, Preset] = {
    "tiny": _TINY,
    "char-gpt": _CHAR_GPT,
    "gpt2-124m": _gpt2("124M", 12, 768, 12),
    "gpt2-medium": _gpt2("medium (355M)", 24, 1024, 16),
    "gpt2-large": _gpt2("large (774M)", 36, 1280, 20),
    "gpt2-xl": _gpt2("XL (1.5B)", 48, 1600, 25),
    "llama2-7b": _llama_like("Llama 2 7B", (32, 4096, 32, 32, 11008), {"vocab_size": 32000, "seq_length": 4096}),
    "llama3-8b": _llama3("3 8B", (32, 4096, 32, 14336)),
    "llama3-70b": _llama3("3 70B", (80, 8192, 64, 28672)),
    "llama3.1-8b": _llama3("3.1 8B", (32, 4096, 32, 14336), stretch=8.0),
    "llama3.2-1b": _llama3("3.2 1B", (16, 2048, 32, 8192), stretch=32.0, tied=True),
    "llama3.2-3b": _llama3("3.2 3B", (28, 3072, 24, 8192), stretch=32.0, tied=True, kv_channels=128),
    "mistral-7b": _llama_like(
        "Mistral 7B v0.1", (32, 4096, 32, 8, 14336), {"vocab_size": 32000, "seq_length": 8192, "sliding_window": 4096}
    ),
    "qwen2.5-0.5b": _llama_like("Qwen2.5 0.5B", (24, 896, 14, 2, 4864), _QWEN2 | {"untie_embeddings_and_output_weights": False}),
    "qwen2.5-7b": _llama_like("Qwen2.5 7B", (28, 3584, 28, 4, 18944), _QWEN2 | {"vocab_size": 152064}),
    "qwen3-0.6b": _llama_like("Qwen3 0.6B", (28, 1024, 16, 8, 3072), _QWEN3 | {"untie_embeddings_and_output_weights": False}),
    "qwen3-8b": _llama_like("Qwen3 8B", (36, 4096, 32, 8, 12288), _QWEN3),
    "smollm2-135m": _llama_like(
        "SmolLM2 135M",
        (30, 576, 9, 3, 1536),
        {"vocab_size": 49152, "seq_length": 8192, "rotary_base": 1e5, "untie_embeddings_and_output_weights": False},
    ),
}


def apply_preset(base: RunConfig, name: str) -> RunConfig:
    """`base` with the preset's values and its name. Raises ConfigError for an unknown name."""
    if name not in PRESETS:
        close = suggest(name, list(PRESETS))
        raise ConfigError(f"unknown preset {name!r}{close or ';'} presets are {', '.join(PRESETS)}")
    return assign(base, {"preset": name, **PRESETS[name].values})
