"""From a GGUF file to a checkpoint that any layout loads.

Decisions
- Tensors are read, brought to fp32 and written one at a time. The `gguf` package (an extra) reads the file and knows its number formats:
  F32, F16, BF16, Q8_0, Q4_0, Q4_1 and its other ones. What 4 bits have lost stays lost.
- Every tensor must be used and every one of ours found.
- `hf/` beside the checkpoint gets what a Hugging Face folder would have: config.json, and the tokenizer where its kind is known, so that
  generation and an export find them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config import DataConfig, RunConfig
from megalite.convert.gguf_config import ARCHITECTURES, model_from_gguf
from megalite.convert.gguf_tokenizer import write_tokenizer
from megalite.convert.hf_config import model_to_hf
from megalite.convert.megatron_names import Rows
from megalite.convert.writing import check_free, logical_shapes, mismatches, whole_tensor, write_weights
from megalite.errors import CheckpointError, ConfigError

__all__ = ["import_gguf"]

_ENDS = {
    "embedding.word.weight": "token_embd.weight",
    "head.norm.weight": "output_norm.weight",
    "head.output.weight": "output.weight",
}
_LAYER = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"attention.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "attention.o_proj": "attn_output",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_LONGEST = 4096  # tokens of a training sequence, unless the model's positions end earlier


def import_gguf(file: Path, out: Path) -> Path:
    """Write a checkpoint of the model in `file` below `out`, and return its path.

    Raises ConfigError for a model that is not known here, an `out` in use or a missing package; CheckpointError for a file that cannot be
    read or whose tensors do not fit.
    """
    check_free(out)
    fields, tensors = _open(file)
    model = model_from_gguf(fields, tensors.keys())
    shapes = logical_shapes(model)
    sources = {name: _source(name) for name in shapes}
    problems = [f"{source} is missing" for source in sources.values() if source not in tensors]
    problems += [f"{name} has no place in this model" for name in tensors.keys() - set(sources.values())]
    if problems:
        raise mismatches(sorted(problems), "the file's settings")
    rows = Rows.of(model, turns_in_pairs=ARCHITECTURES[fields["general.architecture"]])

    def make(name: str) -> Tensor:
        value = _numbers(tensors[sources[name]])
        return whole_tensor(_in_halves(value, name, rows), name, shapes[name], sources[name])

    (out / "hf").mkdir(parents=True, exist_ok=True)
    (out / "hf" / "config.json").write_text(json.dumps(model_to_hf(model), indent=2) + "\n")
    kind = "hf" if write_tokenizer(fields, out / "hf") else None
    tokenizer: dict[str, Any] = {"tokenizer_type": kind, "tokenizer_model": str((out / "hf").resolve())} if kind else {}
    data = DataConfig(seq_length=min(model.max_position_embeddings or _LONGEST, _LONGEST), **tokenizer)
    return write_weights(out, RunConfig(model=model, data=data), shapes, make, file)


def _open(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, tensors as the package has them)."""
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("reading GGUF files needs the gguf package: pip install 'megalite[gguf]'") from error
    try:
        reader = gguf.GGUFReader(file)
        return {key: field.contents() for key, field in reader.fields.items()}, {tensor.name: tensor for tensor in reader.tensors}
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(f"{file} cannot be read as GGUF: {error}") from error


def _source(name: str) -> str:
    if name in _ENDS:
        return _ENDS[name]
    found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
    assert found is not None, f"GGUF has no place for {name}"
    layer, part, kind = found.groups()
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def _numbers(tensor: Any) -> Tensor:
    """fp32 in [out, in] order."""
    import gguf  # pyright: ignore[reportMissingImports]

    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(f"{tensor.name} is in the number format {tensor.tensor_type.name}, which cannot be read") from error
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # fp32 is a view of the file


def _in_halves(value: Tensor, name: str, rows: Rows) -> Tensor:
    found = re.search(r"attention\.([qk])_proj\.", name)
    return rows.halved(value) if found is not None else value
