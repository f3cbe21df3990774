"""A checkpoint of adapters read as the whole model that they make of their base: every tensor is merged when it is asked for.

Whoever reads single tensors of a checkpoint (an export, a model for inference) reads this in the same way, and needs memory for one
tensor and its adapter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from megalite.checkpoint.changes import model_conflicts
from megalite.checkpoint.files import check_contents
from megalite.checkpoint.reading import TensorReader
from megalite.config import RunConfig
from megalite.convert.adapters import adapter_shapes, merged_tensor
from megalite.convert.base import Base, open_base, stored_config
from megalite.errors import CheckpointError
from megalite.grid import Axis

__all__ = ["MergedReader", "check_adapters", "open_merged"]


class MergedReader:
    """The merged model's tensors; an adapter is read with the weight that it belongs to."""

    def __init__(self, adapters: TensorReader, base: Base, settings: RunConfig) -> None:
        self.checkpoint, self.companions = adapters.checkpoint, base.companions
        self._adapters, self._base, self._lora = adapters, base, settings.lora

    def read(self, name: str) -> Tensor:
        """One whole tensor in host memory, by its name in checkpoints (`model.` at the front). Raises CheckpointError."""
        own = name.removeprefix("model.")
        return merged_tensor(own, self._base.read(own), self._lora, lambda part: self._adapters.read(f"model.{part}"))


def open_merged(checkpoint: Path, base: Path | None = None, world: Axis | None = None) -> tuple[MergedReader, RunConfig]:
    """The adapters' run, with the model's vocabulary padded as its base is. Collective over `world`, if given.

    base: a folder to take in place of the one that the run was given. Raises CheckpointError for adapters that do not fit it.
    """
    reader = TensorReader(checkpoint)
    check_contents(checkpoint, reader.manifest.files, world or Axis.single("world"))
    settings = stored_config(reader)
    check_adapters(reader, settings)
    if base is None and settings.lora.lora_base is None:
        raise CheckpointError(f"{checkpoint} holds adapters and does not know their base; convert it with --base DIR")
    opened = open_base(base or Path(settings.lora.lora_base or ""), world)
    conflicts = model_conflicts(replace(settings, model=opened.model).to_dict(), settings.model, ignore=("make_vocab_size_divisible_by",))
    if conflicts:
        raise CheckpointError(f"{opened.folder} is not the model that {checkpoint} was trained beside: {'; '.join(conflicts)}")
    model = replace(settings.model, make_vocab_size_divisible_by=opened.model.make_vocab_size_divisible_by)
    if model.max_position_embeddings != opened.model.max_position_embeddings and model.position_embedding_type == "learned_absolute":
        model = replace(model, max_position_embeddings=opened.model.max_position_embeddings)  # the length of a table of weights
    return MergedReader(reader, opened, settings), replace(settings, model=model)


def check_adapters(reader: TensorReader, settings: RunConfig) -> None:
    """Raises CheckpointError where the checkpoint's adapters are not those of its settings."""
    shapes = {f"model.{name}": list(shape) for name, shape in adapter_shapes(settings.lora, settings.model).items()}
    stored = {name: facts["shape"] for name, facts in reader.stored.items() if name.startswith("model.")}
    wrong = sorted(name for name in shapes.keys() | stored.keys() if shapes.get(name) != stored.get(name))
    if wrong:
        listed = ", ".join(f"{name} ({stored.get(name, 'missing')}, by its settings {shapes.get(name, 'none')})" for name in wrong[:5])
        raise CheckpointError(f"{reader.checkpoint} holds other adapters than its settings say, {len(wrong)} in all: {listed}")
