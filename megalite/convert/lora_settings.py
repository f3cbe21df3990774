"""Says in a LoraConfig's terms which layer has which rank and alpha.

Decisions
- A LoraConfig is written by kinds of layer (`q_proj`): first what a kind has in most layers, then layers without any adapter, then
  single layers; the last setting that is found counts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

from megalite.config import ModelConfig
from megalite.config_lora import TARGETS, LoraConfig
from megalite.convert.adapters import linear_layers

__all__ = ["alpha_of", "lora_of_layers", "most_common"]

T = TypeVar("T")


def lora_of_layers(
    layers: Mapping[str, tuple[int, float]],
    model: ModelConfig,
    *,
    default: tuple[int, float],
    dropout: float,
    use_rslora: bool,
    use_dora: bool,
) -> LoraConfig:
    """layers: {layer with an adapter: (rank, alpha)}, at least one. default: rank and alpha to name where they are as common as others."""
    kinds = {layer.rpartition(".")[2] for layer in layers}
    ranks = {layer: layers[layer][0] if layer in layers else 0 for layer in linear_layers(model) if layer.rpartition(".")[2] in kinds}
    alphas = {layer: alpha for layer, (_, alpha) in layers.items()}
    rank = most_common([rank for rank, _ in layers.values()], default[0])
    alpha = most_common(list(alphas.values()), default[1])
    found = LoraConfig(
        lora_r=rank,
        lora_alpha=float(alpha),
        lora_dropout=float(dropout),
        lora_targets=tuple(kind for kind in TARGETS if kind in kinds),
        lora_ranks=_settings(ranks, rank),
        lora_alphas=_settings(alphas, alpha),
        use_rslora=use_rslora,
        use_dora=use_dora,
    )
    assert {layer: found.rank_of(layer) for layer in ranks} == ranks, f"{found} does not say {ranks}"
    assert all(math.isclose(alpha_of(found, layer), alpha) for layer, alpha in alphas.items()), f"{found} does not say {alphas}"
    return found


def alpha_of(lora: LoraConfig, layer: str) -> float:
    """The alpha of a layer with an adapter; from its scale, so without the last digits of a float."""
    rank = lora.rank_of(layer)
    return float(f"{lora.scale_of(layer) * (math.sqrt(rank) if lora.use_rslora else rank):.13g}")


def most_common(values: list[T], preferred: T) -> T:
    """The value that occurs most often; `preferred` where it is one of several."""
    counts = Counter(values)
    most = max(counts.values())
    return preferred if counts[preferred] == most else next(value for value, count in counts.items() if count == most)


def _settings(values: Mapping[str, float], default: float) -> tuple[str, ...]:
    """REGEX=NUMBER for layers whose value is not `default`."""
    table: dict[str, dict[int, float]] = {}
    for layer, value in values.items():
        _, number, kind = layer.split(".", 2)
        table.setdefault(kind, {})[int(number)] = value
    numbers = sorted({number for by_layer in table.values() for number in by_layer})
    empty = [number for number in numbers if not any(by_layer.get(number) for by_layer in table.values())]
    usual = {
        kind: most_common([value for number, value in by_layer.items() if number not in empty], default) for kind, by_layer in table.items()
    }
    lines = [f"{_escaped(kind)}$={_number(value)}" for kind, value in usual.items() if value != default]
    if empty:
        lines.append(f"^layers{_one_of(empty)}=0")
    for kind, by_layer in table.items():
        for value in sorted({*by_layer.values()} - {usual[kind]}):
            chosen = [number for number, other in by_layer.items() if other == value and number not in empty]
            if chosen:
                lines.append(f"^layers{_one_of(chosen)}{_escaped(kind)}$={_number(value)}")
    return tuple(lines)


def _escaped(kind: str) -> str:
    return kind.replace(".", r"\.")


def _one_of(numbers: list[int]) -> str:
    text = "|".join(map(str, numbers))
    return rf"\.({text})\." if len(numbers) > 1 else rf"\.{text}\."


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
