"""The side file `PREFIX.meta.json`: what the token files themselves cannot say.

A `.bin/.idx` pair holds ids and nothing about the tokenizer that made them. Preprocessing writes this record beside
it, so that training can compare vocabulary and EOD before the first step, merging can refuse what does not belong
together, and inspection can decode. Files from elsewhere have none; that is legal and reads as None. Fields that were
added later have a default, so that older records stay readable.
"""

from __future__ import annotations

import os
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import orjson

from megalite.errors import DataError

__all__ = ["DatasetMeta", "meta_path", "read_meta", "write_meta"]

_FORMAT = 1


@dataclass(frozen=True)
class DatasetMeta:
    """Facts of one dataset.

    `documents` counts all, `empty_documents` those of them without a token; `max_id` is the largest id present.
    `tokenizer_sha256` identifies the tokenizer's files and settings, `tokenizer_spec` says how to build it again,
    `bin_sha256` is the digest of the .bin file.
    """

    tokenizer: str
    vocab_size: int
    eod_id: int | None
    bos_id: int | None
    append_eod: bool
    prepend_bos: bool
    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    max_id: int
    dtype: str
    tokenizer_sha256: str | None = None
    tokenizer_spec: dict[str, Any] = field(default_factory=dict)
    bin_sha256: str | None = None


def meta_path(prefix: str | os.PathLike[str]) -> Path:
    """Where the side file of a dataset lies."""
    return Path(f"{os.fspath(prefix)}.meta.json")


def write_meta(prefix: str | os.PathLike[str], meta: DatasetMeta) -> None:
    """Write the side file of a dataset; it is there completely or not at all."""
    path = meta_path(prefix)
    temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(orjson.dumps({"format": _FORMAT, **asdict(meta)}, option=orjson.OPT_INDENT_2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_meta(prefix: str | os.PathLike[str]) -> DatasetMeta | None:
    """The side file of a dataset, or None where there is none; raises DataError when it is damaged or foreign."""
    path = meta_path(prefix)
    if not path.exists():
        return None
    try:
        content = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DataError(f"{path} is no dataset record of format {_FORMAT}; preprocess the text again or remove the file")
    required = [field.name for field in fields(DatasetMeta) if field.default is MISSING and field.default_factory is MISSING]
    missing = [name for name in required if name not in content]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}; preprocess the text again or remove the file")
    return DatasetMeta(**{field.name: content[field.name] for field in fields(DatasetMeta) if field.name in content})
