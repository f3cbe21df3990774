"""From adapters of megalite to a folder that PEFT loads beside the same base.

Decisions
- What PEFT has no setting for is said with names: targets by full names of modules where a kind of layer has not an adapter everywhere,
  ranks and alphas in pattern tables of which never two entries fit one module.
- GPT-2 has one module for q, k and v. Where the three have one A (as imported ones do) they are one adapter of its rank. Otherwise the
  exact block form is written: the As above each other, the Bs on the diagonal, the ranks added, and alpha so that the scale stays.
- Directions that a run has dropped (`lora_average_rank`; columns of B that are 0) are left out, so a layer's rank is what it uses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint import newest_checkpoint
from megalite.checkpoint.files import check_contents
from megalite.checkpoint.reading import TensorReader
from megalite.config import ModelConfig
from megalite.config_lora import LoraConfig
from megalite.convert.adapters import adapter_shapes, holds_adapters, linear_layers
from megalite.convert.base import is_hf_folder, open_base, stored_config
from megalite.convert.hf_config import family_of
from megalite.convert.lora_settings import alpha_of, most_common
from megalite.convert.merged import check_adapters
from megalite.convert.peft_config import CONFIG_NAME, modules_of
from megalite.convert.peft_import import PREFIX, SUFFIXES, WEIGHTS_NAME
from megalite.convert.source import DTYPES, check_empty
from megalite.errors import CheckpointError, ConfigError
from megalite.grid import Axis

__all__ = ["export_peft", "peft_adapters", "write_peft"]


def export_peft(path: Path, out: Path, *, base: str | None = None, dtype: Literal["fp32", "bf16", "fp16"] = "fp32") -> Path:
    """path: a checkpoint of adapters or a --save folder of such a run; out: a new or empty folder, which is returned.

    base: what the result names as its base, a folder or a name at a hub; None: the run's base, where that is a Hugging Face folder.
    Raises CheckpointError, or ConfigError for a model that no family of Hugging Face computes.
    """
    check_empty(out)
    checkpoint = newest_checkpoint(path)
    reader = TensorReader(checkpoint)
    if not holds_adapters(reader.manifest.tensors):
        raise CheckpointError(f"{checkpoint} holds a whole model and no adapters; --to hf writes it")
    check_contents(checkpoint, reader.manifest.files, Axis.single("world"))
    settings = stored_config(reader)
    check_adapters(reader, settings)
    lora, model = settings.lora, settings.model
    adapters = {name: reader.read(f"model.{name}") for name in adapter_shapes(lora, model)}

    def weight_of(layer: str) -> Tensor:
        if lora.lora_base is None:
            raise CheckpointError(f"{checkpoint} does not know its base, whose {layer} is needed")
        return open_base(Path(lora.lora_base)).read(f"{layer}.weight")

    if base is None and lora.lora_base is not None and is_hf_folder(Path(lora.lora_base)):
        base = lora.lora_base
    config, tensors = peft_adapters(lora, adapters, model, family_of(model), weight_of)
    return write_peft(out, config | {"base_model_name_or_path": base}, {name: value.to(DTYPES[dtype]) for name, value in tensors.items()})


def write_peft(out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write the two files of a folder of PEFT. config and tensors: of `peft_adapters`."""
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in tensors.items()}, out / WEIGHTS_NAME, metadata={"format": "pt"})
    (out / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    return out


@dataclass(frozen=True)
class _Module:
    """The adapter of one module of the Hugging Face model: a [r, in], b [out, r], magnitude [out]."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def peft_adapters(
    lora: LoraConfig,
    adapters: Mapping[str, Tensor],
    model: ModelConfig,
    family: str,
    weight_of: Callable[[str], Tensor] | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(adapter_config.json without the name of a base, {name in the file: tensor}) of adapters by logical name.

    weight_of(layer): the base's [out, in]; only asked for where DoRA covers a part of a fused module. Raises ConfigError without it then.
    """
    sizes, every = linear_layers(model), modules_of(model, family)
    modules = {
        module: _joined(layers, lora, adapters, sizes, weight_of)
        for module, layers in every.items()
        if any(lora.rank_of(layer) for layer in layers)
    }
    tensors = {
        f"{PREFIX}{module}.{suffix}": value
        for module, joined in modules.items()
        for part, suffix in SUFFIXES.items()
        for value in [getattr(joined, part)]
        if value is not None
    }
    ranks, alphas = ({module: getattr(joined, fact) for module, joined in modules.items()} for fact in ("rank", "alpha"))
    rank, alpha = most_common(list(ranks.values()), lora.lora_r or 0), most_common(list(alphas.values()), lora.lora_alpha)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": _plain(alpha),
        "lora_dropout": lora.lora_dropout,
        "target_modules": _targets(list(modules), list(every)),
        "rank_pattern": _pattern(ranks, rank, list(every)),
        "alpha_pattern": {key: _plain(value) for key, value in _pattern(alphas, alpha, list(every)).items()},
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
        "bias": "none",
        "fan_in_fan_out": family == "gpt2",
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    return config, tensors


def _joined(
    layers: list[str],
    lora: LoraConfig,
    adapters: Mapping[str, Tensor],
    sizes: Mapping[str, torch.Size],
    weight_of: Callable[[str], Tensor] | None,
) -> _Module:
    present = [layer for layer in layers if lora.rank_of(layer)]
    a, b = ([adapters[f"{layer}.adapter.{part}"] for layer in present] for part in "ab")
    scales = [lora.scale_of(layer) for layer in present]
    magnitude = None
    if lora.use_dora:
        magnitude = torch.cat([_lengths(layer, adapters, weight_of) for layer in layers])
    if len(present) == len(layers) and all(torch.equal(other, a[0]) for other in a) and len({*scales}) == 1:
        alike = _Module(a[0], torch.cat(b), magnitude, alpha_of(lora, present[0]))
        return alike if lora.lora_average_rank is None else _of_kept(alike, scales[0], lora)
    rank = sum(part.shape[0] for part in a)
    rows = iter(zip(b, scales, strict=True))
    blocks = torch.zeros(sum(sizes[layer][0] for layer in layers), rank)
    row, column = 0, 0
    for layer in layers:
        if layer in present:
            block, scale = next(rows)
            blocks[row : row + block.shape[0], column : column + block.shape[1]] = block * (scale / scales[0])  # most often 1
            column += block.shape[1]
        row += sizes[layer][0]
    joined = _Module(torch.cat(a), blocks, magnitude, _alpha(scales[0], rank, lora))
    return joined if lora.lora_average_rank is None else _of_kept(joined, scales[0], lora)


def _of_kept(module: _Module, scale: float, lora: LoraConfig) -> _Module:
    """`module` without its directions that do nothing; one is left at least."""
    keep = module.b.any(dim=0)
    keep[0] |= not keep.any()
    return _Module(module.a[keep], module.b[:, keep], module.magnitude, _alpha(scale, int(keep.sum()), lora))


def _alpha(scale: float, rank: int, lora: LoraConfig) -> float:
    """With which an adapter of this rank has this scale; without the last digits of a float."""
    return float(f"{scale * (math.sqrt(rank) if lora.use_rslora else rank):.13g}")


def _lengths(layer: str, adapters: Mapping[str, Tensor], weight_of: Callable[[str], Tensor] | None) -> Tensor:
    """DoRA's lengths of a layer; without an adapter those of the base's rows, which change nothing."""
    name = f"{layer}.adapter.magnitude"
    if name in adapters:
        return adapters[name]
    if weight_of is None:
        raise ConfigError(f"{layer} has no adapter, and its module has a DoRA one: the base's weights are needed for its lengths")
    return weight_of(layer).float().norm(dim=1)


def _kind(module: str) -> str:
    """The name within a layer, `self_attn.q_proj` of `model.layers.3.self_attn.q_proj`."""
    return module.split(".", 3)[3]


def _short(kind: str, every: list[str]) -> str:
    """The end of a kind's name that no other kind has."""
    last = kind.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in {_kind(module) for module in every}) == 1 else kind


def _targets(modules: list[str], every: list[str]) -> list[str]:
    targets: list[str] = []
    for kind in dict.fromkeys(map(_kind, modules)):
        chosen = [module for module in modules if _kind(module) == kind]
        is_everywhere = len(chosen) == sum(_kind(module) == kind for module in every)
        targets += [_short(kind, every)] if is_everywhere else chosen
    return targets


def _pattern(values: Mapping[str, float], default: float, every: list[str]) -> dict[str, float]:
    """Values that are not `default`, by kind where all modules of it have one, otherwise by module."""
    table: dict[str, float] = {}
    for kind in dict.fromkeys(map(_kind, values)):
        chosen = {module: value for module, value in values.items() if _kind(module) == kind}
        if len({*chosen.values()}) == 1:
            chosen = {_short(kind, every): next(iter(chosen.values()))}
        table |= {key: value for key, value in chosen.items() if value != default}
    return table


def _plain(value: float) -> float:
    """Whole numbers without a point, as PEFT writes them."""
    return int(value) if float(value).is_integer() else value
