"""Looking at a dataset: its figures, a histogram of document lengths, and a proof that the files hold what they claim.

`IndexedDataset` already refuses an inconsistent index when it opens. `verify` reads everything else too: that the .bin is
exactly the sequences, in order and without gaps; every id against the recorded vocabulary; the side file against what
is there; the digest. It returns all problems that it finds.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from megalite.data.dataset_meta import DatasetMeta
from megalite.data.indexed import IndexedDataset, bin_path
from megalite.data.indexed_writer import is_packed

__all__ = ["Facts", "Verified", "document_ids", "document_lengths", "facts", "histogram", "histogram_lines", "verify"]

_BLOCK_TOKENS = 1 << 22
_PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
_NUM_BINS = 20
_BAR_WIDTH = 40


@dataclass(frozen=True)
class Facts:
    """The figures of a dataset; `percentiles` are of the tokens in a document."""

    dtype: str
    documents: int
    empty_documents: int
    sequences: int
    empty_sequences: int
    tokens: int
    bin_bytes: int
    has_modes: bool
    mean_length: float
    percentiles: dict[str, int]


@dataclass(frozen=True)
class Verified:
    """What reading a whole dataset found; it is sound when `problems` is empty."""

    problems: list[str]
    min_id: int
    max_id: int
    bin_sha256: str


def document_lengths(dataset: IndexedDataset) -> np.ndarray:
    """Tokens of each document, int64 [D]."""
    ends = np.concatenate(([0], np.cumsum(dataset.sizes.astype(np.int64))))
    return np.diff(ends[dataset.document_indices])


def document_ids(dataset: IndexedDataset, number: int) -> list[np.ndarray]:
    """The sequences of document `number`. Raises IndexError when there is none."""
    bounds = dataset.document_indices
    if not 0 <= number < len(bounds) - 1:
        raise IndexError(f"document {number}: {dataset.path_prefix} has documents 0 to {len(bounds) - 2}")
    return [dataset[i] for i in range(int(bounds[number]), int(bounds[number + 1]))]


def facts(dataset: IndexedDataset) -> Facts:
    """The figures that the index alone tells."""
    lengths = document_lengths(dataset)
    values = np.percentile(lengths, _PERCENTILES, method="nearest") if len(lengths) else np.zeros(len(_PERCENTILES))
    return Facts(
        dtype=dataset.dtype.name,
        documents=len(lengths),
        empty_documents=int(np.count_nonzero(lengths == 0)),
        sequences=len(dataset),
        empty_sequences=int(np.count_nonzero(dataset.sizes == 0)),
        tokens=dataset.num_tokens,
        bin_bytes=bin_path(dataset.path_prefix).stat().st_size,
        has_modes=dataset.modes is not None,
        mean_length=float(lengths.mean()) if len(lengths) else 0.0,
        percentiles={f"p{percent}": int(value) for percent, value in zip(_PERCENTILES, values, strict=True)},
    )


def histogram(lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts [bins] and whole-numbered edges [bins + 1] of lengths; bins grow by a factor when the lengths do."""
    low, high = int(lengths.min(initial=0)), int(lengths.max(initial=1))
    if high - low < _NUM_BINS:
        edges = np.arange(low, high + 2)
    else:
        edges = np.unique(np.round(np.geomspace(max(low, 1), high + 1, _NUM_BINS + 1)).astype(np.int64))
        edges = np.concatenate(([0], edges)) if low == 0 else edges
    return np.histogram(lengths, bins=edges)[0], edges


def histogram_lines(lengths: np.ndarray) -> list[str]:
    """The histogram as text; every document is in exactly one line."""
    counts, edges = histogram(lengths)
    most = max(int(counts.max(initial=0)), 1)
    lines = []
    for count, start, end in zip(counts.tolist(), edges[:-1].tolist(), (edges[1:] - 1).tolist(), strict=True):
        bar = "#" * (-(-count * _BAR_WIDTH // most))
        lines.append(f"{start:>9,} to {end:>9,} tokens {count:>11,} {bar}".rstrip())
    return lines


def verify(dataset: IndexedDataset, meta: DatasetMeta | None) -> Verified:
    """Read all of a dataset and compare it with its index and side file."""
    problems = []
    if not is_packed(dataset):
        size = bin_path(dataset.path_prefix).stat().st_size
        expected = dataset.num_tokens * dataset.dtype.itemsize
        problems.append(
            f"the .bin has {size} bytes and the sequences of the index need {expected}"
            if size != expected
            else "the pointers of the index do not follow one another"
        )
    low, high, digest = _read_all(dataset)
    if low < 0:
        problems.append(f"there is a negative id: {low}")
    if meta is not None:
        problems += _against_meta(dataset, meta, high, digest)
    return Verified(problems, low, high, digest)


def _read_all(dataset: IndexedDataset) -> tuple[int, int, str]:
    """The smallest and largest id, and the digest of the .bin, read in blocks."""
    lows, highs = [], []
    digest = hashlib.sha256()
    with bin_path(dataset.path_prefix).open("rb") as file:
        while block := file.read(_BLOCK_TOKENS * dataset.dtype.itemsize):
            digest.update(block)
            ids = np.frombuffer(block, dtype=dataset.dtype, count=len(block) // dataset.dtype.itemsize)
            if len(ids):
                lows.append(int(ids.min()))
                highs.append(int(ids.max()))
    return min(lows, default=0), max(highs, default=-1), digest.hexdigest()


def _against_meta(dataset: IndexedDataset, meta: DatasetMeta, max_id: int, digest: str) -> list[str]:
    lengths = document_lengths(dataset)
    found = {
        "dtype": dataset.dtype.name,
        "documents": len(lengths),
        "empty_documents": int(np.count_nonzero(np.diff(dataset.document_indices) == 0)),
        "sequences": len(dataset),
        "tokens": dataset.num_tokens,
        "max_id": max_id,
        "bin_sha256": digest,
    }
    problems = []
    if max_id >= meta.vocab_size:
        problems.append(f"there is an id {max_id}, but the vocabulary of {meta.tokenizer} ends at {meta.vocab_size - 1}")
    for name, value in found.items():
        recorded = getattr(meta, name)
        if recorded is not None and recorded != value:
            problems.append(f"{name} is {value}, but the side file says {recorded}")
    return problems
