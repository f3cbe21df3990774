"""From a folder of PEFT to adapters that a run loads.

Decisions
- The folder knows only names of modules, so the base says what the model is. The result holds the adapters alone, and its settings name
  the base.
- Every tensor of the file must be used. A chosen layer without any tensors keeps the start of its training, as in PEFT: B is 0.
- GPT-2's q, k and v have one adapter in the file: A is copied to each of them, B's rows and DoRA's lengths are cut in three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.config import ModelConfig, RunConfig
from megalite.config_lora import LoraConfig
from megalite.convert.adapters import adapter_shapes, linear_layers
from megalite.convert.base import open_base
from megalite.convert.hf_config import family_of
from megalite.convert.peft_config import CONFIG_NAME, lora_from_peft, modules_of, read_peft_config
from megalite.convert.writing import check_free, mismatches, write_weights
from megalite.errors import CheckpointError, ConfigError
from megalite.tensor_parallel.init import init_parameter_
from megalite.tensor_parallel.parameter import ParameterInfo

__all__ = ["PREFIX", "SUFFIXES", "WEIGHTS_NAME", "import_peft", "read_peft"]

WEIGHTS_NAME = "adapter_model.safetensors"
PREFIX = "base_model.model."
SUFFIXES = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}


def import_peft(folder: Path, out: Path, base: Path) -> Path:
    """Write a checkpoint of the adapters in `folder` below `out`, and return its path. base: as `open_base` takes it.

    Raises ConfigError for adapters that cannot be represented here or an `out` in use, CheckpointError for tensors that do not fit.
    """
    check_free(out)
    opened = open_base(base)
    lora, adapters = read_peft(folder, opened.model, family_of(opened.model), lambda layer: opened.read(f"{layer}.weight"))
    config = RunConfig(model=opened.model, data=opened.data, lora=replace(lora, lora_base=str(base.resolve())))
    shapes = {name: value.shape for name, value in adapters.items()}
    # the writer takes the memory of what it has written
    return write_weights(out, config, shapes, lambda name: adapters[name].clone(memory_format=torch.contiguous_format), folder)


def read_peft(
    folder: Path, model: ModelConfig, family: str, weight_of: Callable[[str], Tensor] | None = None
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """The adapters in `folder` for `model` of a `family` of `hf_config.FAMILIES`: settings without a base, fp32 tensors by logical name.

    weight_of(layer): the base's [out, in]; only asked for where DoRA has to begin in a layer. Raises as `import_peft`.
    """
    lora = lora_from_peft(read_peft_config(folder), model, family)
    found = _read_file(folder)
    sizes, problems = linear_layers(model), list[str]()
    adapters: dict[str, Tensor] = {}
    for module, layers in modules_of(model, family).items():
        if lora.rank_of(layers[0]):
            parts = {part: found.pop(f"{PREFIX}{module}.{suffix}") for part, suffix in SUFFIXES.items() if _is_there(found, module, suffix)}
            adapters |= _of_module(parts, layers, lora, sizes, weight_of) if _is_whole(parts, module, lora, problems) else {}
    problems += [f"{name} has no place in these adapters" for name in sorted(found)]
    for name, shape in adapter_shapes(lora, model).items():
        if name in adapters and adapters[name].shape != shape:
            problems.append(f"{name} would have shape {list(adapters[name].shape)}, {list(shape)} is wanted")
    if problems:
        raise mismatches(problems, f"{CONFIG_NAME} and the base")
    return lora, adapters


def _read_file(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_NAME
    if not path.is_file():
        old = folder / "adapter_model.bin"
        if old.is_file():
            remedy = "load it with PEFT and call save_pretrained(folder), which writes safetensors"
            raise ConfigError(f"{old} is a pickle, which is not read: {remedy}")
        raise CheckpointError(f"{folder} has no {WEIGHTS_NAME}")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _is_there(found: dict[str, Tensor], module: str, suffix: str) -> bool:
    return f"{PREFIX}{module}.{suffix}" in found


def _is_whole(parts: dict[str, Tensor], module: str, lora: LoraConfig, problems: list[str]) -> bool:
    """Whether there are all tensors of a module or none; adds to `problems`."""
    wanted = ["a", "b", *(["magnitude"] if lora.use_dora else [])]
    missing = [part for part in wanted if part not in parts] if parts else []
    problems += [f"{PREFIX}{module}.{SUFFIXES[part]} is missing" for part in missing]
    if "magnitude" in parts and not lora.use_dora:
        problems.append(f"{PREFIX}{module}.{SUFFIXES['magnitude']} is there, though use_dora is false")
        return False
    flat = [part for part in parts if parts[part].dim() != (1 if part == "magnitude" else 2)]
    problems += [f"{PREFIX}{module}.{SUFFIXES[part]} has shape {list(parts[part].shape)}" for part in flat]
    return not missing and not flat


def _of_module(
    parts: dict[str, Tensor],
    layers: list[str],
    lora: LoraConfig,
    sizes: dict[str, torch.Size],
    weight_of: Callable[[str], Tensor] | None,
) -> dict[str, Tensor]:
    if not parts:
        return {name: value for layer in layers for name, value in _begun(layer, lora, sizes[layer], weight_of).items()}
    made, rows = {}, [sizes[layer][0] for layer in layers]
    for part, value in parts.items():
        fits = part == "a" or sum(rows) == value.shape[0]  # otherwise the comparison of shapes says so
        pieces = [value] * len(layers) if part == "a" or not fits else value.split(rows)
        made |= {f"{layer}.adapter.{part}": piece for layer, piece in zip(layers, pieces, strict=True)}
    return made


def _begun(layer: str, lora: LoraConfig, size: torch.Size, weight_of: Callable[[str], Tensor] | None) -> dict[str, Tensor]:
    """An adapter as a run begins it, which changes nothing."""
    rank, (rows, columns) = lora.rank_of(layer), size
    made = {f"{layer}.adapter.a": torch.empty(rank, columns), f"{layer}.adapter.b": torch.zeros(rows, rank)}
    start = ParameterInfo(role="linear", init="normal", std=1 / math.sqrt(3 * columns))
    init_parameter_(f"{layer}.adapter.a", made[f"{layer}.adapter.a"], start, seed=RunConfig().train.seed)
    if lora.use_dora:
        if weight_of is None:
            raise ConfigError(
                f"{layer} has no tensors in the file: the lengths of DoRA begin as those of the base's rows, which are not known"
            )
        made[f"{layer}.adapter.magnitude"] = weight_of(layer).float().norm(dim=1)
    return made
