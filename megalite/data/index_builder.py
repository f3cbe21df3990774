"""The index loops that are too long for Python: cutting documents into samples, interleaving datasets, shuffling.

Each exists twice: in C++ (`csrc/index_builder.cpp`) and here as a `*_reference`, which is the definition and the
fallback where the extension was not compiled. The public functions choose; the results are equal to the last bit.

Samples. Documents are laid end to end in the order of `document_index`; sample n covers the tokens
[n * seq_length, (n + 1) * seq_length + extra), with extra = 1 when one more token is needed for the last label. So
neighbours share that token: the last label of one is the first input of the next.

Blends. At every step the dataset furthest below its share gives its next sample. This is deterministic, not random, and
keeps every dataset close to its share all the time.

Shuffles. The C++ class draws the numbers of `numpy.random.RandomState`, which is the definition.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Protocol

import numpy as np

__all__ = [
    "LegacyRandom",
    "build_blending_indices",
    "build_blending_indices_reference",
    "build_exhaustive_blending_indices",
    "build_exhaustive_blending_indices_reference",
    "build_sample_index",
    "build_sample_index_reference",
    "legacy_random",
    "native_builder",
]

_INT32_MAX = np.iinfo(np.int32).max
_MAX_DATASETS = np.iinfo(np.int16).max


def build_sample_index(
    sizes: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int, add_extra_token: bool = True
) -> np.ndarray:
    """Borders of `num_samples` samples: [num_samples + 1, 2] of (position in `document_index`, token offset there).

    `sizes` int32 or int64: tokens of every document; `document_index` int32 or int64: documents in reading order. The
    result is int32 unless positions or sizes pass 2^31 - 1. When the tokens end early the last sample stays short.
    Raises ValueError for a document that does not exist, a negative size, or a bad count.
    """
    builder = native_builder()
    build = build_sample_index_reference if builder is None else builder.build_sample_index
    # Arrays mapped from an .idx file are not aligned; C++ must not read those.
    aligned = [np.require(values, dtype=_index_dtype(values), requirements=["C", "A"]) for values in (sizes, document_index)]
    return build(aligned[0], aligned[1], seq_length, num_samples, add_extra_token)


def build_blending_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """A blend of `size` samples by share: (dataset int16 [size], sample number within that dataset int64 [size]).

    `weights` are shares of the samples and sum to 1. Raises ValueError for no dataset, more than 32767, a weight that is
    negative or not finite, or size < 0.
    """
    builder = native_builder()
    build = build_blending_indices_reference if builder is None else builder.build_blending_indices
    return build([float(weight) for weight in weights], int(size))


def build_exhaustive_blending_indices(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """A blend of all samples of all datasets, in proportion until one is used up: (dataset int16, sample int64).

    `sizes` are the lengths of the datasets. Raises ValueError for no dataset, more than 32767, or a negative size.
    """
    builder = native_builder()
    build = build_exhaustive_blending_indices_reference if builder is None else builder.build_exhaustive_blending_indices
    return build([int(size) for size in sizes])


class LegacyRandom(Protocol):
    """The part of `numpy.random.RandomState` that the index arrays are drawn with."""

    def shuffle(self, x: np.ndarray, /) -> None:
        """Shuffle [n] in place; int32, uint32 or int64, contiguous."""
        ...


def legacy_random(seed: int) -> LegacyRandom:
    """A fresh generator whose shuffles are those of `numpy.random.RandomState(seed)`. `seed` in [0, 2^32)."""
    builder = native_builder()
    return np.random.RandomState(seed) if builder is None else builder.LegacyRandom(seed)


@cache
def native_builder() -> ModuleType | None:
    """The compiled extension, or None, with one warning, where it was not built."""
    try:
        return importlib.import_module("megalite._index_builder")
    except ImportError as error:
        logging.getLogger("megalite").warning(
            "the compiled index builder is missing (%s): NumPy and Python build the data indices, the same but slower; "
            "`pip install --editable .` with a C++ compiler builds it",
            error,
        )
        return None


def build_sample_index_reference(
    sizes: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int, add_extra_token: bool = True
) -> np.ndarray:
    """`build_sample_index` as a closed form: border n is token n * seq_length of the stream, found by bisection."""
    if seq_length < 1 or num_samples < 0 or (num_samples > 0 and len(document_index) == 0):
        raise ValueError(f"{num_samples} samples of {seq_length} tokens from {len(document_index)} documents")
    wide = max(len(document_index), int(np.max(sizes, initial=0))) > _INT32_MAX
    borders = np.zeros((num_samples + 1, 2), dtype=np.int64 if wide else np.int32)
    if num_samples == 0:
        return borders
    lengths = _lengths_in_order(sizes, document_index)
    ends = np.cumsum(lengths, dtype=np.int64)
    tokens = np.arange(1, num_samples + 1, dtype=np.int64) * seq_length
    # The token that decides is the last one read: the border itself with an extra token, else the one before it, and
    # then the border can lie at the end of a document instead of at the start of the next.
    positions = np.searchsorted(ends, tokens, side="right" if add_extra_token else "left")
    beyond = positions == len(document_index)  # the data ends inside this sample: it stays short
    positions[beyond] = len(document_index) - 1
    offsets = tokens - (ends - lengths)[positions]
    offsets[beyond] = lengths[-1] - int(add_extra_token)
    borders[1:, 0], borders[1:, 1] = positions, offsets
    return borders


def build_blending_indices_reference(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """`build_blending_indices`, in Python."""
    return _blend_reference(np.asarray(weights, dtype=np.float64), size, lambda taken: np.ones(len(taken), dtype=bool))


def build_exhaustive_blending_indices_reference(sizes: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """`build_exhaustive_blending_indices`, in Python."""
    counts = np.asarray(sizes, dtype=np.int64)
    if np.any(counts < 0):
        raise ValueError("the size of a dataset must not be negative")
    total = int(counts.sum())
    weights = counts / max(total, 1)
    return _blend_reference(weights, total, lambda taken: taken < counts)


def _blend_reference(weights: np.ndarray, size: int, allowed: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    if not 0 < len(weights) <= _MAX_DATASETS or size < 0:
        raise ValueError(f"a blend of {size} samples from {len(weights)} datasets; 1 to {_MAX_DATASETS} are possible")
    if not np.all(np.isfinite(weights) & (weights >= 0)):
        raise ValueError(f"a weight of {weights.tolist()} is not a number of 0 or more")
    dataset_index, sample_index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    taken = np.zeros(len(weights), dtype=np.int64)
    for step in range(size):
        behind = np.where(allowed(taken), weights * float(max(step, 1)) - taken, -np.inf)
        chosen = int(np.argmax(behind))
        dataset_index[step], sample_index[step] = chosen, taken[chosen]
        taken[chosen] += 1
    return dataset_index, sample_index


def _lengths_in_order(sizes: np.ndarray, document_index: np.ndarray) -> np.ndarray:
    """Tokens of each document in reading order, int64. Raises ValueError for a document that cannot be."""
    missing = (document_index < 0) | (document_index >= len(sizes))
    if np.any(missing):
        position = int(np.argmax(missing))
        raise ValueError(f"document_index[{position}] is {document_index[position]}, but there are {len(sizes)} sizes")
    lengths = sizes[document_index].astype(np.int64)
    if np.any(lengths < 0):
        raise ValueError(f"the size of document {document_index[int(np.argmax(lengths < 0))]} is negative")
    return lengths


def _index_dtype(values: np.ndarray) -> np.dtype:
    return np.dtype(np.int32) if values.dtype == np.int32 else np.dtype(np.int64)
