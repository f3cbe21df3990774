"""Data without files, for tests, demonstrations and benchmarks: deterministic, and learnable enough for a loss to fall.

The tokens walk along one fixed random cycle through the vocabulary, from a start that differs per sample, and a tenth
of them are replaced by random ids. So a model that learns which id follows which predicts most tokens, and the loss of
an untrained one is log(vocab_size). S sequence, V vocab.
"""

from __future__ import annotations

import numpy as np

from megalite.data.sample import Sample
from megalite.errors import DataError

__all__ = ["MockDataset"]

_NOISE = 0.1


class MockDataset:
    """`num_samples` samples of `seq_length` tokens below `vocab_size`; sample i is a function of (`seed`, i) alone.

    `masked_fraction` is the chance of each position to have loss mask 0, so that micro-batches hold unequal numbers of
    loss-bearing tokens. Raises DataError for sizes that make no dataset.
    """

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int = 0, *, masked_fraction: float = 0.0) -> None:
        if min(vocab_size, seq_length, num_samples) < 1 or seed < 0 or not 0 <= masked_fraction <= 1:
            raise DataError(
                f"mock data of {num_samples} samples of {seq_length} tokens below {vocab_size}, seed {seed}, masked "
                f"fraction {masked_fraction}: sizes must be positive, the seed not negative, the fraction in [0, 1]"
            )
        self.vocab_size, self.seq_length, self.seed = vocab_size, seq_length, seed
        self.masked_fraction = masked_fraction
        self._num_samples = num_samples
        self._cycle = self._random(0).permutation(vocab_size).astype(np.int64)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        """Sample `i`, fresh arrays. Raises IndexError beyond the end."""
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of {self._num_samples}")
        random = self._random(i + 1)
        start = random.randint(self.vocab_size)
        tokens = self._cycle[(start + np.arange(self.seq_length + 1)) % self.vocab_size]
        noisy = random.random_sample(self.seq_length + 1) < _NOISE
        tokens[noisy] = random.randint(self.vocab_size, size=int(noisy.sum()))
        kept = random.random_sample(self.seq_length) >= self.masked_fraction
        return Sample(
            tokens=tokens[:-1].copy(),
            labels=tokens[1:].copy(),
            loss_mask=kept.astype(np.float32),
            position_ids=np.arange(self.seq_length, dtype=np.int64),
        )

    def _random(self, stream: int) -> np.random.RandomState:
        # The legacy generator is the one whose stream NumPy promises never to change.
        words = [number >> shift & 0xFFFFFFFF for number in (self.seed, stream) for shift in (0, 32)]
        return np.random.RandomState(words)
