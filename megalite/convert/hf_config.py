"""Between a Hugging Face config.json and a ModelConfig.

Decisions
- Nothing is guessed: a key that is not known here is an error, because it might change what is computed. Keys that cannot are listed.
- Both spellings are read: transformers 4 (`rope_theta`, `rope_scaling`, `torch_dtype`) and 5 (`rope_parameters`, `dtype`).
- What is written is the spelling of version 4, which both read.
- Families are told apart by what is computed: the same ModelConfig always becomes the same family.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.config import ModelConfig
from megalite.convert.hf_rope import read_rope, write_rope
from megalite.errors import ConfigError

__all__ = ["FAMILIES", "family_of", "model_from_hf", "model_to_hf", "read_hf_config"]

FAMILIES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NEUTRAL = set(
    """_name_or_path architectures auto_map bos_token_id dtype eos_token_id gradient_checkpointing id2label initializer_range is_decoder
    is_encoder_decoder label2id max_window_layers model_type n_ctx output_attentions output_hidden_states pad_token_id pretraining_tp
    return_dict summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    tokenizer_class torch_dtype transformers_version use_cache""".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {  # values of other keys with which the computation is ours
    "add_cross_attention": (False,),
    "reorder_and_upcast_attn": (False, True),  # an fp32 softmax is what we have
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "hidden_act": ("silu", "swish"),
    "use_bidirectional_attention": (None, False),
    "tie_word_embeddings": (True, False),
    "use_sliding_window": (True, False, None),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
}
_GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
_READ = set(
    """hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size vocab_size rms_norm_eps
    max_position_embeddings rope_theta rope_scaling rope_parameters partial_rotary_factor sliding_window layer_types attention_dropout
    n_embd n_head n_inner n_layer n_positions layer_norm_epsilon activation_function attn_pdrop resid_pdrop embd_pdrop""".split()
)


def read_hf_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no config.json: it is no Hugging Face model") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a table of settings")
    return found


def model_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Raises ConfigError with everything that is unknown or cannot be computed here."""
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"model_type {family!r} cannot be converted; families are {known} (no experts, no Gemma)")
    found = [f"{key} is {config[key]!r}: only {' or '.join(map(repr, values))} can be computed here"
             for key, values in _ONLY.items() if key in config and config[key] not in values]  # fmt: skip
    unknown = sorted(config.keys() - _NEUTRAL - _ONLY.keys() - _READ)
    found += [f"{key} ({config[key]!r}) is not known here and might change the computation" for key in unknown]
    try:
        values = _gpt2(config) if family == "gpt2" else _llama_like(family, config)
    except KeyError as error:
        found.append(f"{error.args[0]} is missing")
    except ConfigError as error:
        found += error.violations
    if found:
        raise ConfigError([f"config.json: {text}" for text in found])
    return ModelConfig(**values)


def _gpt2(config: Mapping[str, Any]) -> dict[str, Any]:
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GPT2_ACTIVATIONS:
        raise ConfigError(f"activation_function {activation!r} cannot be computed here: only {', '.join(_GPT2_ACTIVATIONS)}")
    hidden = {config.get(key, 0.1) for key in ("resid_pdrop", "embd_pdrop")}
    if len(hidden) > 1:
        raise ConfigError(f"resid_pdrop and embd_pdrop differ ({sorted(hidden)}): here they are one setting")
    return {
        "num_layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "num_attention_heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 4 * config["n_embd"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["n_positions"],
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config["layer_norm_epsilon"],
        "activation": _GPT2_ACTIVATIONS[activation],
        "add_bias_linear": True,
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", True),
        "hidden_dropout": hidden.pop(),
        "attention_dropout": config.get("attn_pdrop", 0.1),
        **_init(config),
    }


def _llama_like(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    bias = bool(config.get("attention_bias", False))
    return {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "num_attention_heads": heads,
        "num_query_groups": config.get("num_key_value_heads") or heads,
        "kv_channels": config.get("head_dim") or config["hidden_size"] // heads,
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
        "normalization": "RMSNorm",
        "norm_epsilon": config["rms_norm_eps"],
        "activation": "swiglu",
        "add_qkv_bias": bias or family == "qwen2",
        "add_attention_output_bias": bias and family != "qwen2",
        "add_mlp_bias": bool(config.get("mlp_bias", False)),
        "qk_layernorm": family == "qwen3",
        "sliding_window": _window(family, config),
        "untie_embeddings_and_output_weights": not config.get("tie_word_embeddings", False),
        "attention_dropout": config.get("attention_dropout") or 0.0,
        **read_rope(config),
        **_init(config),
    }


def _init(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"init_method_std": config["initializer_range"]} if config.get("initializer_range") else {}


def _window(family: str, config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if window is None or (family in ("qwen2", "qwen3") and not config.get("use_sliding_window")):
        return None
    if family == "llama":
        raise ConfigError(f"sliding_window {window} in a Llama, which has none")
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None and family != "mistral":
        full = min(config.get("max_window_layers", layers), layers)
        kinds = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    if kinds is None or set(kinds) == {"sliding_attention"}:
        return window
    if set(kinds) == {"full_attention"}:
        return None
    raise ConfigError("some layers have a sliding window and others have not: here all layers are alike")


def family_of(model: ModelConfig) -> str:
    """The family that computes what `model` does. Raises ConfigError where none does."""
    if model.position_embedding_type == "learned_absolute":
        return _require(model, "gpt2", model.normalization == "LayerNorm" and model.add_bias_linear and model.activation != "swiglu"
                        and model.activation != "relu_squared" and not model.qk_layernorm and model.sliding_window is None)  # fmt: skip
    plain = model.position_embedding_type == "rope" and model.normalization == "RMSNorm" and model.activation == "swiglu"
    if model.qk_layernorm:
        return _require(model, "qwen3", plain and model.has_qkv_bias == model.has_attention_output_bias and not model.has_mlp_bias)
    if model.has_qkv_bias and not model.has_attention_output_bias:
        return _require(model, "qwen2", plain and not model.has_mlp_bias)
    if model.sliding_window is not None:
        return _require(model, "mistral", plain and not model.has_qkv_bias and not model.has_mlp_bias)
    return _require(model, "llama", plain and model.has_qkv_bias == model.has_attention_output_bias and model.hidden_dropout == 0)


def _require(model: ModelConfig, family: str, holds: bool) -> str:
    if not holds:
        raise ConfigError(f"no Hugging Face family computes this model; {family} is the nearest: {model}")
    return family


def model_to_hf(model: ModelConfig) -> dict[str, Any]:
    """config.json in the spelling of transformers 4. Raises ConfigError for a model that no family computes."""
    family = family_of(model)
    common = {
        "architectures": [FAMILIES[family]],
        "model_type": family,
        "vocab_size": model.known_vocab_size,
        "tie_word_embeddings": not model.untie_embeddings_and_output_weights,
        "initializer_range": model.init_method_std,
        "torch_dtype": "float32",
        "use_cache": True,
        "bos_token_id": None,  # a family's defaults are tokens of another vocabulary
        "eos_token_id": None,
    }
    return common | (_gpt2_fields(model) if family == "gpt2" else _llama_fields(model, family))


def _gpt2_fields(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_attention_heads,
        "n_inner": model.ffn_size,
        "n_positions": model.max_position_embeddings,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": {"gelu_tanh": "gelu_new", "gelu": "gelu"}[model.activation],
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
    }


def _llama_fields(model: ModelConfig, family: str) -> dict[str, Any]:
    fields = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "max_position_embeddings": model.max_position_embeddings,
        "attention_dropout": model.attention_dropout,
        **write_rope(model),
    }
    if family in ("llama", "qwen3"):
        fields["attention_bias"] = model.has_qkv_bias
    if family == "llama":
        fields["mlp_bias"] = model.has_mlp_bias
    if family == "mistral":
        fields["sliding_window"] = model.sliding_window
    if family in ("qwen2", "qwen3"):
        has_window = model.sliding_window is not None
        fields |= {
            "use_sliding_window": has_window,
            "sliding_window": model.sliding_window,
            "max_window_layers": 0 if has_window else model.num_layers,
        }
    return fields
