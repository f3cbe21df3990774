"""Several datasets as one, mixed by share.

Decisions
- A weight is a share of the samples (not of epochs, documents or tokens of the dataset): 0.3 web 0.7 books gives 3 of 10
  samples from web, however large it is; small datasets are repeated. Without weights every dataset is read once, in
  proportion to its length.
- The order of datasets is fixed by the weights: each step takes the dataset furthest below its share. It is not random,
  so any stretch of training has the shares that were asked for. It equals Megatron's to the last bit.
- The blend comes first, the datasets are then built for the samples that it really takes from them. Megatron instead
  estimates them, by ceil(ceil(N w) * 1.005), before it has a blend, and fails in the middle of a run when the estimate
  was too low. The number a dataset is built for decides how often it is repeated and thereby its shuffle, so for the
  sake of the same order the estimate is kept wherever it suffices, and replaced by the true count where not.
- A blend's length is the sum of the rounded-up shares, which can be a few samples more than asked for, as Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megalite.data.index_builder import build_blending_indices, build_exhaustive_blending_indices
from megalite.data.index_cache import cached_arrays
from megalite.data.sample import Piece, Sample, SampleDataset
from megalite.errors import DataError

__all__ = ["BlendIndices", "BlendedDataset", "blend_everything", "blend_weighted", "normalized", "rounded_shares", "sufficient_request"]

_SURPLUS = 0.005
_INDEX_NAMES = ("dataset_index", "dataset_sample_index")


@dataclass(frozen=True)
class BlendIndices:
    """Sample i of the blend is sample `dataset_sample_index[i]` (int64) of dataset `dataset_index[i]` (int16)."""

    dataset_index: np.ndarray
    dataset_sample_index: np.ndarray

    def counts(self, num_datasets: int) -> list[int]:
        """Samples taken from each dataset."""
        return np.bincount(self.dataset_index, minlength=num_datasets).tolist()


class BlendedDataset:
    """The samples of `datasets` in the order of `indices`. Raises DataError when a dataset is too short for them."""

    def __init__(self, datasets: Sequence[SampleDataset], indices: BlendIndices) -> None:
        self.datasets, self.indices = list(datasets), indices
        short = [
            f"dataset {number} has {len(dataset)} samples, the blend takes {count}"
            for number, (dataset, count) in enumerate(zip(self.datasets, indices.counts(len(self.datasets)), strict=True))
            if count > len(dataset)
        ]
        if short:
            raise DataError(f"the datasets are too short for their blend: {'; '.join(short)}")

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.indices.dataset_index)

    def __getitem__(self, i: int) -> Sample:
        """Sample `i`, in fresh arrays. Raises IndexError beyond the end."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend of {len(self)}")
        return self.datasets[int(self.indices.dataset_index[i])][int(self.indices.dataset_sample_index[i])]

    def pieces(self, i: int) -> list[Piece]:
        """Where the tokens of sample `i` lie, in order; for datasets that can tell."""
        number = int(self.indices.dataset_index[i])
        pieces = self.datasets[number].pieces(int(self.indices.dataset_sample_index[i]))  # type: ignore[attr-defined]
        return [piece._replace(dataset=number) for piece in pieces]

    def samples_with(self, sequence: int, dataset: int) -> list[int]:
        """The samples that read any token of `sequence` of dataset number `dataset`, ascending."""
        taken = np.flatnonzero(self.indices.dataset_index == dataset)  # the dataset's sample m is the m-th of them
        samples = self.datasets[dataset].samples_with(sequence)  # type: ignore[attr-defined]
        return [int(taken[sample]) for sample in samples if sample < len(taken)]


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as shares that sum to 1."""
    values = np.asarray(weights, dtype=np.float64)
    return (values / np.sum(values)).tolist()


def rounded_shares(shares: Sequence[float], num_samples: int) -> list[int]:
    """Samples of each dataset in a blend of about `num_samples`, rounded up."""
    return [math.ceil(num_samples * share) for share in shares]


def sufficient_request(share: int, count: int, length_for: Callable[[int], int], surplus: float = _SURPLUS) -> int:
    """The number of samples to build a dataset for: Megatron's estimate where that gives the `count` that the blend takes.

    `share` is the rounded-up share, `length_for(request)` the length of the dataset when it is built for `request`.
    """
    estimate = math.ceil(share * (1 + surplus))
    return estimate if length_for(estimate) >= count else count


def blend_weighted(shares: Sequence[float], size: int, cache_dir: Path | None = None) -> BlendIndices:
    """A blend of `size` samples by `shares`, which sum to 1; kept in `cache_dir` if there is one."""
    return _cached(cache_dir, {"shares": list(shares), "size": size}, lambda: build_blending_indices(shares, size))


def blend_everything(lengths: Sequence[int], cache_dir: Path | None = None) -> BlendIndices:
    """A blend of all samples of datasets of the given lengths, in proportion to them; kept in `cache_dir` if there is one."""
    return _cached(cache_dir, {"lengths": list(lengths)}, lambda: build_exhaustive_blending_indices(lengths))


def _cached(cache_dir: Path | None, settings: dict, build: Callable[[], tuple[np.ndarray, np.ndarray]]) -> BlendIndices:
    if cache_dir is None:
        return BlendIndices(*build())
    return BlendIndices(*cached_arrays(cache_dir, "blend", settings, (), _INDEX_NAMES, build))
