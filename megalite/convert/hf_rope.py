"""Rotary settings of a Hugging Face config.json, in both of its spellings.

transformers 4: `rope_theta` and `rope_scaling`; 5: `rope_parameters` with the base inside. An unknown kind or key is an error: dropping it
would give other logits without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.errors import ConfigError

__all__ = ["read_rope", "write_rope"]

_KEYS = {
    "linear": (),
    "dynamic": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
_LENGTH = "original_max_position_embeddings"


def read_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """ModelConfig's fields. Raises ConfigError."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    settings = dict(new or old or {})
    base = settings.pop("rope_theta", config.get("rope_theta"))
    share = settings.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    fields: dict[str, Any] = {"rotary_percent": share or 1.0}
    if base is None:
        raise ConfigError("rope_theta is missing: it stands by itself or inside rope_parameters")
    fields["rotary_base"] = float(base)
    old_kind = settings.pop("type", "default")
    kind = settings.pop("rope_type", old_kind)
    if kind == "default":
        if settings:
            raise ConfigError(f"rope settings {sorted(settings)} without a rope_type cannot be understood")
        return fields
    if kind not in _KEYS:
        raise ConfigError(f"rope_type {kind!r} cannot be computed here: kinds are default, {', '.join(_KEYS)}")
    unknown = sorted(settings.keys() - {"factor", _LENGTH, *_KEYS[kind]})
    if unknown:
        raise ConfigError(f"rope settings {unknown} are not known for rope_type {kind}")
    return fields | {"rope_scaling": kind, **_scaling(kind, settings, config.get("max_position_embeddings"))}


def _scaling(kind: str, settings: Mapping[str, Any], longest: int | None) -> dict[str, Any]:
    length, factor = settings.get(_LENGTH), settings.get("factor")
    if factor is None and kind == "yarn" and longest and length:
        factor = longest / length
    if factor is None:
        raise ConfigError(f"rope_type {kind} has no factor")
    if kind == "llama3" and not (length and all(key in settings for key in _KEYS[kind])):
        raise ConfigError(f"rope_type llama3 needs {_LENGTH}, {' and '.join(_KEYS[kind])}")
    fields: dict[str, Any] = {"rope_scaling_factor": float(factor)}
    if length:
        fields["rope_scaling_original_length"] = length
    return fields | {f"rope_scaling_{key}": settings[key] for key in _KEYS[kind] if settings.get(key) is not None}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Keys of config.json in the spelling of transformers 4."""
    fields: dict[str, Any] = {"rope_theta": model.rotary_base}
    if model.rotary_percent != 1.0:
        fields["partial_rotary_factor"] = model.rotary_percent
    kind = model.rope_scaling
    if kind == "none":
        return fields
    settings: dict[str, Any] = {"rope_type": kind, "factor": model.rope_scaling_factor}
    if model.rope_scaling_original_length is not None:
        settings[_LENGTH] = model.rope_scaling_original_length
    values = {key: getattr(model, f"rope_scaling_{key}") for key in _KEYS[kind]}
    return fields | {"rope_scaling": settings | {key: value for key, value in values.items() if value is not None}}
