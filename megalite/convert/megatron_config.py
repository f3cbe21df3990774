"""Between Megatron's arguments, which its checkpoints carry along, and a ModelConfig.

Decisions
- What a model needs and the arguments do not say is listed as an error; `--model-config` can say it.
- Arguments that make another model than ours are refused by name. Arguments that only make it faster are not looked at.
- A checkpoint knows only the padded vocabulary, which depends on the writer's layout; the true one is asked for.
- Megatron's GELU is the tanh form where it is fused with a bias (its default) and the exact one elsewhere.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.errors import ConfigError

__all__ = ["arguments_of", "model_from_arguments"]

_NEEDED = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "group_query_attention", "kv_channels", "normalization"),
    *("swiglu", "add_bias_linear", "position_embedding_type", "max_position_embeddings", "untie_embeddings_and_output_weights"),
)
_NEEDED_FOR_ROPE = ("rotary_base", "rotary_percent")
_STRANGE = (  # arguments that only other models have
    *("num_experts", "multi_latent_attention", "mtp_num_layers", "heterogeneous_layers_config_path", "attention_output_gate"),
    *("apply_residual_connection_post_layernorm", "qk_l2_norm", "no_rope_freq", "activation_func_clamp_value", "quick_geglu"),
    *("experimental_attention_variant", "linear_attention_freq", "window_attn_skip_freq", "hybrid_override_pattern", "is_hybrid_model"),
    *("hybrid_layer_pattern", "attention_chunk_size", "use_mup", "spec", "retro_add_retriever", "mrope_section", "glu_linear_offset"),
)
_ONLY: dict[str, tuple[Any, ...]] = {  # values of arguments with which the model is ours
    **dict.fromkeys(_STRANGE, (None, False, 0)),
    "softmax_type": ("vanilla",),
    "normalization": ("RMSNorm", "LayerNorm"),
    "position_embedding_type": ("rope", "learned_absolute", "none"),
    "mup_output_mult": (1.0,),
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_length": 8192}  # fixed in Megatron


def model_from_arguments(arguments: Mapping[str, Any], vocab_size: int | None) -> ModelConfig:
    """Raises ConfigError with all that is missing or cannot be computed here."""
    given = {name: getattr(value, "value", value) for name, value in arguments.items()}
    found = [f"{name} is {given[name]!r}: a model like that cannot be computed here"
             for name, values in _ONLY.items() if name in given and given[name] not in values]  # fmt: skip
    needed = _NEEDED + (_NEEDED_FOR_ROPE if given.get("position_embedding_type") == "rope" else ())
    if given.get("group_query_attention"):
        needed += ("num_query_groups",)
    missing = [name for name in needed if name not in given]
    if "norm_epsilon" not in given and "layernorm_epsilon" not in given:
        missing.append("norm_epsilon")
    if missing:
        found.append(f"the checkpoint's arguments lack {', '.join(missing)}: give --model-config (a config.json or config.toml)")
    if vocab_size is None:
        padded = given.get("padded_vocab_size")
        found.append(f"the checkpoint only knows the padded vocabulary ({padded}): give --vocab-size, the tokenizer's true number")
    if given.get("qk_layernorm") and given.get("normalization") == "LayerNorm":
        found.append("qk_layernorm with LayerNorm cannot be computed here: only with RMSNorm")
    if found:
        raise ConfigError(found)
    return ModelConfig(vocab_size=vocab_size, **_sizes(given), **_parts(given), **_positions(given))


def _sizes(given: Mapping[str, Any]) -> dict[str, Any]:
    groups = given["num_query_groups"] if given["group_query_attention"] else given["num_attention_heads"]
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "max_position_embeddings")
    return {name: given[name] for name in names} | {"num_query_groups": groups}


def _parts(given: Mapping[str, Any]) -> dict[str, Any]:
    window = given.get("window_size")
    return {
        "normalization": given["normalization"],
        "norm_epsilon": given.get("norm_epsilon", given.get("layernorm_epsilon")),
        "activation": _activation(given),
        "add_bias_linear": given["add_bias_linear"],
        "add_qkv_bias": bool(given.get("add_qkv_bias")),
        "qk_layernorm": bool(given.get("qk_layernorm")),
        "untie_embeddings_and_output_weights": given["untie_embeddings_and_output_weights"],
        "sliding_window": int(window[0]) + 1 if window and window[0] >= 0 else None,  # Megatron does not count the token itself
        **{name: given[name] for name in ("hidden_dropout", "attention_dropout", "init_method_std") if given.get(name) is not None},
    }


def _activation(given: Mapping[str, Any]) -> str:
    if given["swiglu"]:
        return "swiglu"
    if given.get("squared_relu"):
        return "relu_squared"
    if given.get("openai_gelu"):
        return "gelu_tanh"
    if given.get("onnx_safe") or not given["add_bias_linear"]:
        return "gelu"
    if "bias_gelu_fusion" not in given:
        raise ConfigError("the checkpoint's arguments lack bias_gelu_fusion, which decides between two forms of GELU: give --model-config")
    return "gelu_tanh" if given["bias_gelu_fusion"] else "gelu"


def _positions(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = given["position_embedding_type"]
    if kind != "rope":
        return {"position_embedding_type": kind}
    fields: dict[str, Any] = {"position_embedding_type": "rope", **{name: float(given[name]) for name in _NEEDED_FOR_ROPE}}
    stretch = given.get("rotary_seq_len_interpolation_factor")
    if given.get("use_rope_scaling"):
        if stretch not in (None, 1):
            raise ConfigError("use_rope_scaling together with rotary_seq_len_interpolation_factor cannot be computed here")
        factor = float(given.get("rope_scaling_factor", 8.0))  # 8 is fixed in versions without the argument
        fields |= {"rope_scaling": "llama3", "rope_scaling_factor": factor}
        return fields | {f"rope_scaling_{name}": value for name, value in _LLAMA3.items()}
    return fields | ({} if stretch in (None, 1) else {"rope_scaling": "linear", "rope_scaling_factor": float(stretch)})


def arguments_of(model: ModelConfig, seq_length: int) -> argparse.Namespace:
    """As Megatron has them, of a model that is not split. Raises ConfigError for a model that its arguments cannot express."""
    found = _inexpressible(model)
    if found:
        raise ConfigError([f"Megatron's arguments cannot express this model: {text}" for text in found])
    values: dict[str, Any] = {name: getattr(model, name) for name in (
        *("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "normalization"),
        *("qk_layernorm", "untie_embeddings_and_output_weights", "hidden_dropout", "attention_dropout"),
        *("init_method_std", "position_embedding_type", "rotary_percent", "make_vocab_size_divisible_by", "norm_epsilon"),
    )}  # fmt: skip
    values |= {
        "add_bias_linear": _has_all_biases(model),
        "add_qkv_bias": model.has_qkv_bias and not _has_all_biases(model),
        "ffn_hidden_size": model.ffn_size,
        "group_query_attention": model.num_kv_heads != model.num_attention_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "layernorm_epsilon": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings or seq_length,
        "vocab_size": model.known_vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "swiglu": model.activation == "swiglu",
        "squared_relu": model.activation == "relu_squared",
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "rotary_base": int(model.rotary_base),
        "use_rope_scaling": model.rope_scaling == "llama3",
        "rope_scaling_factor": model.rope_scaling_factor if model.rope_scaling == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": int(model.rope_scaling_factor) if model.rope_scaling == "linear" else None,
        "rotary_interleaved": False,
        "window_size": None if model.sliding_window is None else (model.sliding_window - 1, 0),
        "apply_layernorm_1p": False,
        "layernorm_zero_centered_gamma": False,
        "add_position_embedding": True,
        "seq_length": seq_length,
        **{f"{name}_model_parallel_size": 1 for name in ("tensor", "pipeline", "expert")},
        "context_parallel_size": 1,
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
    }
    return argparse.Namespace(**values)


def _inexpressible(model: ModelConfig) -> list[str]:
    found = []
    if model.rope_scaling in ("dynamic", "yarn"):
        found.append(f"rope_scaling {model.rope_scaling}")
    if model.rope_scaling == "llama3":
        for name, value in _LLAMA3.items():
            have = getattr(model, f"rope_scaling_{name}") or model.max_position_embeddings
            if have != value:
                found.append(f"rope_scaling_{name} {have}, which is {value} there")
    for name in ("rotary_base", "rope_scaling_factor") if model.position_embedding_type == "rope" else ():
        is_whole = getattr(model, name) == int(getattr(model, name))
        if not is_whole and (name == "rotary_base" or model.rope_scaling == "linear"):
            found.append(f"{name} {getattr(model, name)}, which is a whole number there")
    if (model.has_attention_output_bias or model.has_mlp_bias) and not _has_all_biases(model):
        found.append("biases in some of the linear layers, which are in q, k and v only, or in all there")
    if model.activation == "gelu_tanh" and not _has_all_biases(model):
        found.append("gelu_tanh without biases")
    return found


def _has_all_biases(model: ModelConfig) -> bool:
    return model.has_qkv_bias and model.has_attention_output_bias and model.has_mlp_bias
