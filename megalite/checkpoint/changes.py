"""What a resumed run does otherwise than the run that saved its checkpoint.

Decisions
- The settings of the new run count, always; each one that changed is said, old -> new.
- The layout may change freely and is not mentioned; where results go neither.
- Tensors of equal shapes can still be another model (the same width cut into other heads, another epsilon). Such a change is refused.
  Settings that people change on purpose between stages of one training (dropout, the rotary base) are only said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from megalite.config import ModelConfig

__all__ = ["changed_settings", "model_conflicts"]

_SECTIONS = ("model", "data", "optim", "train", "numerics", "memory", "lora")
_FREE = {"hidden_dropout", "attention_dropout", "rotary_base", "max_position_embeddings", "init_method_std"}
_DERIVED = {"num_query_groups": "num_kv_heads", "kv_channels": "head_dim", "ffn_hidden_size": "ffn_size"}


def changed_settings(stored: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """ "name old -> new" for every setting that both know and that differs. Both: what `RunConfig.to_dict` gives."""
    return [
        f"{name} {_plain(old[name])} -> {_plain(new[name])}"
        for section in _SECTIONS
        for old, new in [(_table(stored, section), _table(now, section))]
        for name in sorted(old.keys() & new.keys())
        if _plain(old[name]) != _plain(new[name])
    ]


def model_conflicts(stored: Mapping[str, Any], model: ModelConfig, ignore: Sequence[str] = ()) -> list[str]:
    """One line per setting that makes `model` compute something else than the stored run's model.

    stored: what `RunConfig.to_dict` gave when the checkpoint was written; settings that one side does not know are not compared, nor
    those in `ignore`.
    """
    table = _table(stored, "model")
    known = [entry.name for entry in fields(ModelConfig) if entry.name in table]
    old = ModelConfig(**{name: table[name] for name in known})
    return [
        f"{name} {_plain(before)} in the checkpoint, {_plain(after)} in the run"
        for name in known
        for before, after in [(_meaning(old, name), _meaning(model, name))]
        if name not in _FREE and name not in ignore and _plain(before) != _plain(after)
    ]


def _meaning(model: ModelConfig, name: str) -> Any:
    """The setting, or the number that it stands for when it is not set."""
    return getattr(model, _DERIVED.get(name, name))


def _table(settings: Mapping[str, Any], section: str) -> Mapping[str, Any]:
    table = settings.get(section, {})
    return table if isinstance(table, Mapping) else {}


def _plain(value: Any) -> Any:
    """JSON has lists where a configuration has tuples."""
    return tuple(_plain(item) for item in value) if isinstance(value, list | tuple) else value
