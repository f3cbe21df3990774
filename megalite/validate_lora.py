"""What can be wrong with the settings of adapters; see `validate`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from megalite.config import RunConfig
from megalite.config_lora import ALL_LINEAR, TARGETS, LoraConfig

__all__ = ["lora_violations"]


def lora_violations(config: RunConfig) -> list[str]:
    """One sentence for everything that adapters cannot do or would ignore. Pure."""
    lora = config.lora
    if lora.lora_r is None:
        return _ignored(lora)
    if lora.lora_r < 1:
        return []  # said with the other numbers that must be positive
    found = []
    if not 0 < lora.lora_alpha < math.inf:
        found.append(f"lora_alpha is {lora.lora_alpha}: use a number above 0, such as twice lora_r")
    if not 0 <= lora.lora_dropout < 1:
        found.append(f"lora_dropout is {lora.lora_dropout}: use 0 (none) or more, and less than 1")
    if lora.lora_base is None:
        found.append("lora_r without lora_base: the frozen weights would be random; give --lora-base the folder of a checkpoint")
    found += _target_violations(config)
    found += _pattern_violations("lora_ranks", lora.lora_ranks, is_rank=True)
    found += _pattern_violations("lora_alphas", lora.lora_alphas, is_rank=False)
    if lora.quantize_base is not None and config.numerics.fp8 is not None:
        found.append(f"quantize_base {lora.quantize_base} and fp8 {config.numerics.fp8} are two kinds of product: leave out one of them")
    found += _allocation_violations(config)
    if not found:
        found += _reach_violations(config)
    return found


def _ignored(lora: LoraConfig) -> list[str]:
    default = LoraConfig()
    names = [name for name in vars(default) if getattr(lora, name) != getattr(default, name)]
    return [f"{', '.join(names)} without lora_r: there are no adapters; add --lora-r, such as 8, or leave them out"] if names else []


def _target_violations(config: RunConfig) -> list[str]:
    targets = config.lora.lora_targets
    present = tuple(name for name in TARGETS if name != "gate_proj" or config.model.activation == "swiglu")
    if not targets:
        return [f"lora_targets is empty: name some of {', '.join(present)}, or {ALL_LINEAR}"]
    unknown = [name for name in targets if name not in (*present, ALL_LINEAR)]
    if not unknown:
        return []
    return [f"lora_targets has {', '.join(map(repr, unknown))}: the linear layers of this model are {', '.join(present)} (or {ALL_LINEAR})"]


def _pattern_violations(name: str, settings: Sequence[str], *, is_rank: bool) -> Iterator[str]:
    example = "'layers.0.attention=4'" if is_rank else "'down_proj=32'"
    for setting in settings:
        expression, separator, text = setting.rpartition("=")
        if not separator or not expression:
            yield f"{name} {setting!r} is not REGEX=NUMBER, such as {example}"
            continue
        try:
            re.compile(expression)
        except re.error as error:
            yield f"{name} {setting!r}: {expression!r} is not a regular expression ({error})"
        if is_rank and not re.fullmatch(r"[0-9]+", text):
            yield f"{name} {setting!r}: the rank {text!r} is not a whole number of 0 or more"
        if not is_rank and not _is_positive(text):
            yield f"{name} {setting!r}: {text!r} is not a number above 0"


def _allocation_violations(config: RunConfig) -> list[str]:
    lora, iters = config.lora, config.train.train_iters
    start, end = lora.lora_allocation_start, lora.allocation_end(iters)
    if lora.lora_average_rank is None:
        default = LoraConfig()
        names = [name for name in vars(default) if "allocation" in name and getattr(lora, name) != getattr(default, name)]
        return [f"{', '.join(names)} without lora_average_rank: no directions are dropped; add it, or leave them out"] if names else []
    found = []
    if not 0 < lora.lora_average_rank <= (lora.lora_r or 0):
        found.append(f"lora_average_rank is {lora.lora_average_rank}: use more than 0, and at most lora_r {lora.lora_r}")
    if not 0 <= start < end <= iters:
        found.append(
            f"lora_allocation_start {start} and lora_allocation_end {end} with train_iters {iters}: use 0 <= start < end <= train_iters"
        )
    return found


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False


def _reach_violations(config: RunConfig) -> list[str]:
    """Settings that are found in no layer, and runs that would train nothing."""
    lora, gated = config.lora, config.model.activation == "swiglu"
    parts = [f"attention.{part}_proj" for part in "qkvo"] + [f"mlp.{part}_proj" for part in (("gate",) if gated else ()) + ("up", "down")]
    layers = [f"layers.{number}.{part}" for number in range(config.model.num_layers) for part in parts]
    found = []
    for name in ("lora_ranks", "lora_alphas"):
        for setting in getattr(lora, name):
            expression = setting.rpartition("=")[0]
            if not any(re.search(expression, layer) for layer in layers):
                found.append(f"{name} {setting!r} is found in no layer: they are called {layers[0]} to {layers[-1]}")
    if not any(lora.rank_of(layer) for layer in layers):
        found.append("lora_targets and lora_ranks leave no layer with an adapter: nothing would be trained")
    return found
