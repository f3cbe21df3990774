"""Several datasets into one, as if their inputs had been preprocessed together.

Decisions. Ids are copied file by file in blocks, so memory holds the index alone. What cannot belong together is refused
before anything is written, with both values: another dtype, another tokenizer (by the digest of its files), another EOD,
BOS, or way of adding them. Where every input has a side file the result has one; where only some have, the result has none,
as it could not be true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from megalite.data.dataset_meta import DatasetMeta, meta_path, read_meta, write_meta
from megalite.data.indexed import IndexedDataset, index_path
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.errors import ConfigError, DataError
from megalite.log import get_logger

__all__ = ["find_prefixes", "merge"]

_log = get_logger(__name__)
_MUST_AGREE = ("tokenizer_sha256", "vocab_size", "eod_id", "bos_id", "append_eod", "prepend_bos")
_SUMS = ("documents", "empty_documents", "sequences", "tokens")


def find_prefixes(folder: Path) -> list[str]:
    """The prefixes of all file pairs in a folder, in string order (`x_10` before `x_2`, as in Megatron).

    Raises DataError for none, or for a file without its partner.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; to merge files, give their prefixes")
    found = {suffix: {path.with_suffix("") for path in folder.glob(f"*{suffix}")} for suffix in (".bin", ".idx")}
    lonely = sorted(found[".bin"] ^ found[".idx"])
    if lonely:
        raise DataError(f"{lonely[0]} has only one of its two files, .bin and .idx; write it again or take it out of {folder}")
    if not found[".idx"]:
        raise DataError(f"{folder} holds no pair of .bin and .idx files")
    return sorted(str(path) for path in found[".idx"])


def merge(prefixes: Sequence[str], output_prefix: str) -> DatasetMeta | None:
    """Write the documents of all datasets, in the order given, to `output_prefix`; returns its side file, if it has one.

    Raises ConfigError for no or a repeated input, or one that is the output; DataError for a damaged or unlike input.
    """
    _check_names(prefixes, output_prefix)
    metas = [read_meta(prefix) for prefix in prefixes]
    known = [(prefix, meta) for prefix, meta in zip(prefixes, metas, strict=True) if meta is not None]
    _check_alike(prefixes, known)
    if known and len(known) < len(prefixes):
        without = next(prefix for prefix, meta in zip(prefixes, metas, strict=True) if meta is None)
        _log.warning("%d of %d inputs have no .meta.json (%s), so the result has none", len(prefixes) - len(known), len(prefixes), without)
    writer = IndexedDatasetWriter(output_prefix, IndexedDataset(prefixes[0]).dtype)
    try:
        for prefix in prefixes:
            writer.add_index(prefix)
        writer.prepare()
        meta = _merged([meta for _, meta in known], writer) if len(known) == len(prefixes) else None
        index_path(output_prefix).unlink(missing_ok=True)
        meta_path(output_prefix).unlink(missing_ok=True)
        if meta is not None:
            write_meta(output_prefix, meta)
        writer.publish()
    finally:
        writer.abort()
    return meta


def _check_names(prefixes: Sequence[str], output_prefix: str) -> None:
    resolved = [Path(prefix).resolve() for prefix in prefixes]
    violations = []
    if not prefixes:
        violations.append("nothing to merge: give a folder or two or more prefixes")
    twice = next((prefix for prefix, path in zip(prefixes, resolved, strict=True) if resolved.count(path) > 1), None)
    if twice is not None:
        violations.append(f"{twice} is given twice; its documents would be in the result twice")
    if Path(output_prefix).resolve() in resolved:
        violations.append(f"the output {output_prefix} is one of the inputs; choose another name")
    if violations:
        raise ConfigError(violations)


def _check_alike(prefixes: Sequence[str], known: Sequence[tuple[str, DatasetMeta]]) -> None:
    """Open every input once (which validates it) and compare it with the first."""
    first = prefixes[0]
    dtype = IndexedDataset(first).dtype
    for prefix in prefixes[1:]:
        other = IndexedDataset(prefix).dtype
        if other != dtype:
            raise DataError(
                f"{first} holds {dtype.name} ids and {prefix} holds {other.name} ids; "
                "preprocess one of them again with the other's tokenizer"
            )
    for prefix, meta in known[1:]:
        reference_prefix, reference = known[0]
        for name in _MUST_AGREE:
            ours, theirs = getattr(reference, name), getattr(meta, name)
            is_unknown = name == "tokenizer_sha256" and None in (ours, theirs)  # an older side file
            if is_unknown and reference.tokenizer != meta.tokenizer:
                name, ours, theirs = "tokenizer", reference.tokenizer, meta.tokenizer
            elif is_unknown:
                continue
            if ours != theirs:
                raise DataError(
                    f"{reference_prefix} ({reference.tokenizer}) and {prefix} ({meta.tokenizer}) do not belong together: "
                    f"{name} is {ours} and {theirs}; preprocess one of them again with the settings of the other"
                )


def _merged(metas: Sequence[DatasetMeta], writer: IndexedDatasetWriter) -> DatasetMeta:
    sums = {name: sum(getattr(meta, name) for meta in metas) for name in _SUMS}
    counted = (writer.num_documents, writer.num_sequences, writer.num_tokens)
    if (sums["documents"], sums["sequences"], sums["tokens"]) != counted:
        raise DataError(
            f"the side files tell {sums['documents']} documents, {sums['sequences']} sequences and {sums['tokens']} tokens, "
            f"but there are {counted[0]}, {counted[1]} and {counted[2]}: one of them belongs to other data"
        )
    return replace(metas[0], **sums, max_id=max(meta.max_id for meta in metas), bin_sha256=writer.bin_sha256)
