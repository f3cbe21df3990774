"""What a dataset records about its tokenizer: how to build it again, and a digest that tells two tokenizers apart.

Names do not: most tokenizer files are called tokenizer.json. The digest covers the files that decide ids (not where they
lie) and the settings that change ids.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from megalite.data.tokenizer import TokenizerSpec
from megalite.errors import DataError

__all__ = ["recorded_spec", "spec_from_record", "tokenizer_sha256"]

_FOLDER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json", "vocab.json", "merges.txt")
_ID_SETTINGS = ("special_tokens_in_text", "eod_token", "tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size")


def tokenizer_sha256(spec: TokenizerSpec) -> str:
    """The digest of a tokenizer's files and settings. Raises DataError when a file cannot be read."""
    digest = hashlib.sha256(spec.kind.encode())
    mode = "allow" if spec.special_tokens_in_text == "allow" else "plain"  # counting does not change ids
    settings = asdict(replace(spec, special_tokens_in_text=mode))
    for name in _ID_SETTINGS:
        digest.update(f"|{name}={settings[name]}".encode())
    for path in _files(spec):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        digest.update(b"|%d|" % len(content) + content)
    return digest.hexdigest()


def _files(spec: TokenizerSpec) -> list[Path]:
    if spec.tokenizer_model is None:
        return []
    model = Path(spec.tokenizer_model)
    if model.is_dir():
        return [path for name in _FOLDER_FILES if (path := model / name).exists()]
    beside = [model.with_name(f"{model.name}.json")] if spec.kind == "tiktoken" else []
    merges = [Path(spec.merge_file)] if spec.merge_file else []
    return [model, *merges, *(path for path in beside if path.exists())]


def recorded_spec(spec: TokenizerSpec) -> dict[str, Any]:
    """The settings that differ from the defaults, with absolute paths."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if getattr(spec, field.name) != field.default}
    for name in ("tokenizer_model", "merge_file"):
        if values.get(name):
            values[name] = str(Path(values[name]).resolve())
    return values


def spec_from_record(record: dict[str, Any]) -> TokenizerSpec:
    """The settings again. Raises DataError for a record that is none."""
    try:
        return TokenizerSpec(**record)
    except TypeError:
        raise DataError(f"the dataset's record of its tokenizer is damaged or from another version: {record}") from None
