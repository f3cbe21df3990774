"""Between PEFT's adapter_config.json and a LoraConfig.

Decisions
- PEFT chooses layers by the names of modules: a list of names or ends of names, a regular expression for whole names, or all-linear.
  Which of our layers are meant, with which rank and alpha, is worked out layer by layer as PEFT does (of a pattern table the first
  entry that fits counts), and said again in our terms.
- Nothing is guessed: a key that is not known here and is not empty is an error, because it might change what is computed.
- GPT-2 has one module where we have q, k and v; each of the three gets the module's rank and alpha.

Format: https://huggingface.co/docs/peft, package_reference/lora.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.config import ModelConfig
from megalite.config_lora import ALL_LINEAR, LoraConfig
from megalite.convert.adapters import linear_layers
from megalite.convert.hf_names import source_of
from megalite.convert.lora_settings import lora_of_layers
from megalite.errors import ConfigError

__all__ = ["CONFIG_NAME", "lora_from_peft", "modules_of", "read_peft_config"]

CONFIG_NAME = "adapter_config.json"
_NEUTRAL = set(
    """auto_mapping base_model_name_or_path ensure_weight_tying fan_in_fan_out inference_mode megatron_core peft_version
    qalora_group_size revision""".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {  # values of other keys with which the computation is ours
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base's weights when they begin
}
_READ = set(
    """alpha_pattern exclude_modules layers_pattern layers_to_transform lora_alpha lora_dropout r rank_pattern target_modules use_dora
    use_rslora""".split()
)
_OUTSIDE = ("embedding.word.weight", "embedding.position.weight", "head.output.weight")
_PEFT_R, _PEFT_ALPHA = 8, 8  # where the file does not say


def read_peft_config(folder: Path) -> dict[str, Any]:
    """The folder's adapter_config.json. Raises ConfigError."""
    path = folder / CONFIG_NAME
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder} has no {CONFIG_NAME}: it is no folder of PEFT") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a table of settings")
    return found


def modules_of(model: ModelConfig, family: str) -> dict[str, list[str]]:
    """{module of the Hugging Face model: our linear layers in it, in the order of its rows}; `model.layers.3.self_attn.q_proj`."""
    modules: dict[str, list[str]] = {}
    for layer in linear_layers(model):
        modules.setdefault(_module(f"{layer}.weight", family), []).append(layer)
    return modules


def lora_from_peft(raw: Mapping[str, Any], model: ModelConfig, family: str) -> LoraConfig:
    """What `raw` does to `model`, without a base. Raises ConfigError with everything that is unknown or cannot be represented."""
    found = [f"{key} is {raw[key]!r}: only {' or '.join(map(repr, values))} can be represented here"
             for key, values in _ONLY.items() if key in raw and raw[key] not in values]  # fmt: skip
    if "peft_type" not in raw:
        found.append("peft_type is missing")
    unknown = sorted(key for key in raw.keys() - _NEUTRAL - _ONLY.keys() - _READ if raw[key])
    found += [f"{key} ({raw[key]!r}) cannot be represented here" for key in unknown]
    found += _wrong_values(raw)
    if not found:
        found += _wrong_targets(raw, family)
    if found:
        raise ConfigError([f"{CONFIG_NAME}: {text}" for text in found])
    layers: dict[str, tuple[int, float]] = {}
    for module, ours in modules_of(model, family).items():
        if _is_target(raw, module):
            layers |= dict.fromkeys(ours, _rank_and_alpha(raw, module))
    if not layers:
        raise ConfigError(f"{CONFIG_NAME}: target_modules {raw['target_modules']!r} names no linear layer of this model ({family})")
    return lora_of_layers(
        layers,
        model,
        default=(raw.get("r", _PEFT_R), raw.get("lora_alpha", _PEFT_ALPHA)),
        dropout=raw.get("lora_dropout") or 0.0,
        use_rslora=bool(raw.get("use_rslora")),
        use_dora=bool(raw.get("use_dora")),
    )


def _module(name: str, family: str) -> str:
    return source_of(name, family).name.rpartition(".")[0]


def _wrong_values(raw: Mapping[str, Any]) -> Iterator[str]:
    ranks, alphas = raw.get("rank_pattern") or {}, raw.get("alpha_pattern") or {}
    for name, table in (("rank_pattern", ranks), ("alpha_pattern", alphas)):
        if not isinstance(table, Mapping):
            yield f"{name} is {table!r}, a table of names and numbers is wanted"
            return
        yield from (f"{name}: {key!r} is not a regular expression" for key in table if not _is_expression(key))
    for key, rank in {"r": raw.get("r", _PEFT_R), **{f"rank_pattern {key!r}": rank for key, rank in ranks.items()}}.items():
        if type(rank) is not int or rank < 1:
            yield f"{key} is {rank!r}, a whole number of 1 or more is wanted"
    for key, alpha in {"lora_alpha": raw.get("lora_alpha", _PEFT_ALPHA), **{f"alpha_pattern {k!r}": a for k, a in alphas.items()}}.items():
        if type(alpha) not in (int, float) or not alpha > 0:
            yield f"{key} is {alpha!r}, a number above 0 is wanted"
    for key in ("target_modules", "exclude_modules", "layers_pattern"):
        value = raw.get(key)
        if isinstance(value, str) and not _is_expression(value):
            yield f"{key} {value!r} is not a regular expression"
        if not isinstance(value, str | list | None) or (key == "target_modules" and not value):
            yield f"{key} is {value!r}, names of modules or a regular expression is wanted"
    chosen = raw.get("layers_to_transform")
    if chosen and isinstance(raw.get("target_modules"), str):
        yield "layers_to_transform goes with a list of target_modules, not with a regular expression"
    if not isinstance(chosen, int | None) and not (isinstance(chosen, list) and all(type(one) is int for one in chosen)):
        yield f"layers_to_transform is {chosen!r}, numbers of layers are wanted"


def _is_expression(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _wrong_targets(raw: Mapping[str, Any], family: str) -> Iterator[str]:
    """Targets among the modules that take no adapter here."""
    for name in _OUTSIDE:
        if name == "embedding.position.weight" and family != "gpt2":
            continue
        module = _module(name, family)
        if not _is_all_linear(raw) and _is_target(raw, module):
            yield f"target_modules {raw['target_modules']!r} names {module}: embedding and head have no adapters here"


def _is_all_linear(raw: Mapping[str, Any]) -> bool:
    return isinstance(raw["target_modules"], str) and raw["target_modules"].lower() == ALL_LINEAR


def _is_target(raw: Mapping[str, Any], module: str) -> bool:
    targets, excluded = raw["target_modules"], raw.get("exclude_modules")
    if excluded and _names(excluded, module):
        return False
    if _is_all_linear(raw):
        return True
    if not _names(targets, module):
        return False
    return isinstance(targets, str) or module in targets or _in_chosen_layer(raw, module)


def _names(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return module in names or any(module.endswith(f".{name}") for name in names)


def _in_chosen_layer(raw: Mapping[str, Any], module: str) -> bool:
    chosen, patterns = raw.get("layers_to_transform"), raw.get("layers_pattern") or [r"[^.]*"]
    if chosen is None or chosen == []:
        return True
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        found = re.match(rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\.", module)
        if found is not None:
            return int(found["layer"]) in ([chosen] if isinstance(chosen, int) else chosen)
    return False


def _rank_and_alpha(raw: Mapping[str, Any], module: str) -> tuple[int, float]:
    return (
        _of_pattern(raw.get("rank_pattern") or {}, module, raw.get("r", _PEFT_R)),
        _of_pattern(raw.get("alpha_pattern") or {}, module, raw.get("lora_alpha", _PEFT_ALPHA)),
    )


def _of_pattern(table: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in table.items() if re.match(rf"(.*\.)?({key})$", module)), default)
