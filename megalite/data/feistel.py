"""A second order of samples that is computed, not stored: sample i is a function of (seed, i) and the document sizes.

Megatron's order keeps three arrays that grow with samples and epochs. This one keeps the running sum of the document
sizes, once, and nothing else, so starting costs the same for one epoch and for a thousand.

What the samples are. The documents are laid end to end in file order and cut every `seq_length` tokens; only the
samples are shuffled, anew in each epoch. So neighbours in the file share a sample, as they do not in Megatron's order:
use it for corpora whose documents are already in random order. Every epoch reads `(tokens - 1) // seq_length` samples,
each exactly once, before the next epoch begins. The few tokens that are left over are cut off in front and at the
end, in another proportion each epoch, so that no token is always left out and samples begin elsewhere each time.

The shuffle is a Feistel network (Luby and Rackoff 1988) over the smallest power of two that holds the samples: two
halves of the bits are mixed into each other with a keyed function, which is a permutation whatever the function. A
result beyond the samples is permuted again until it falls among them (cycle walking, Black and Rogaway 2002); that
takes less than two rounds on average.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megalite.data.gpt_dataset import check_corpus
from megalite.data.sample import Piece, Sample, SampleFormat, TokenSource, read_stream, stream_pieces
from megalite.errors import ConfigError, DataError

__all__ = ["FeistelDataset", "FeistelPermutation"]

_ROUNDS = 8
_WORD = (1 << 64) - 1


class FeistelPermutation:
    """A permutation of 0 .. size - 1, chosen by `key` (any int >= 0); calling it takes constant time and no memory."""

    def __init__(self, size: int, key: int) -> None:
        assert size >= 1, size
        self._size = size
        bits = max(2, (size - 1).bit_length())
        self._low_bits = bits // 2
        self._low_mask, self._high_mask = (1 << bits // 2) - 1, (1 << bits - bits // 2) - 1
        self._keys = [_mix(key + number) for number in range(1, _ROUNDS + 1)]

    def __call__(self, i: int) -> int:
        """Where `i` goes; 0 <= i < size."""
        assert 0 <= i < self._size, (i, self._size)
        while True:
            low, high = i & self._low_mask, i >> self._low_bits
            for even, odd in zip(self._keys[::2], self._keys[1::2], strict=True):
                low ^= _mix(high ^ even) & self._low_mask
                high ^= _mix(low ^ odd) & self._high_mask
            i = high << self._low_bits | low
            if i < self._size:
                return i

    def inverse(self, i: int) -> int:
        """What goes to `i`: `permutation.inverse(permutation(i)) == i`."""
        assert 0 <= i < self._size, (i, self._size)
        while True:
            low, high = i & self._low_mask, i >> self._low_bits
            for even, odd in zip(self._keys[-2::-2], self._keys[::-2], strict=True):
                high ^= _mix(low ^ odd) & self._high_mask
                low ^= _mix(high ^ even) & self._low_mask
            i = high << self._low_bits | low
            if i < self._size:
                return i


class _Epoch(NamedTuple):
    number: int
    offset: int  # the token at which the first sample begins
    order: FeistelPermutation


class FeistelDataset:
    """Samples of `format.seq_length` tokens from the sequences `sequence_range` of `indexed`, in the order of the module's head.

    `num_samples`: the length, repeating the data as often as needed; None for one pass. Raises ConfigError for settings
    that contradict each other, DataError when the data does not make one sample.
    """

    def __init__(
        self,
        indexed: TokenSource,
        sample_format: SampleFormat,
        *,
        num_samples: int | None,
        sequence_range: tuple[int, int],
        seed: int,
        split_name: str,
    ) -> None:
        self.indexed, self.format, self.split_name, self.seed = indexed, sample_format, split_name, seed
        self._first = sequence_range[0]
        check_corpus(indexed, sequence_range, split_name)
        violations = sample_format.violations()
        if violations:
            raise ConfigError([f"{split_name} split of {indexed.path_prefix}: {violation}" for violation in violations])
        self._ends = np.cumsum(indexed.sizes[slice(*sequence_range)].astype(np.int64))
        num_tokens, length = int(self._ends[-1]), sample_format.seq_length
        self.samples_per_epoch = (num_tokens - 1) // length
        if self.samples_per_epoch < 1:
            raise DataError(
                f"{split_name} split of {indexed.path_prefix}: {num_tokens} tokens, one sample of sequence length {length} needs "
                f"{length + 1}: use a shorter sequence, more documents, or the megatron order, which joins epochs"
            )
        self._spare = num_tokens - 1 - self.samples_per_epoch * length
        self._num_samples = self.samples_per_epoch if num_samples is None else num_samples
        self._epoch = self._make_epoch(0)

    def __len__(self) -> int:
        """The number of samples."""
        return self._num_samples

    def __getitem__(self, i: int) -> Sample:
        """Sample `i`, in fresh arrays. Raises IndexError beyond the end."""
        return self.format.sample(read_stream(self.indexed, *self._span(i)))

    def pieces(self, i: int) -> list[Piece]:
        """Where the tokens of sample `i` lie, in order: seq_length + 1 in all."""
        return [piece for piece in stream_pieces(self.indexed, *self._span(i)) if piece.stop > piece.start]

    def samples_with(self, sequence: int) -> list[int]:
        """The samples that read any token of `sequence`, ascending. Takes time per epoch, none per document or sample."""
        place, length = sequence - self._first, self.format.seq_length
        if not 0 <= place < len(self._ends) or self.indexed.sizes[sequence] == 0:
            return []
        end = int(self._ends[place])
        start = end - int(self.indexed.sizes[sequence])
        found = []
        for number in range(-(-len(self) // self.samples_per_epoch)):
            epoch = self._make_epoch(number)
            first = max(0, -(-(start - epoch.offset - length) // length))
            last = min(self.samples_per_epoch - 1, (end - 1 - epoch.offset) // length)
            found += [number * self.samples_per_epoch + epoch.order.inverse(sample) for sample in range(first, last + 1)]
        return sorted(i for i in found if i < len(self))

    def _make_epoch(self, number: int) -> _Epoch:
        key = _mix(self.seed) ^ _mix(~number & _WORD)
        return _Epoch(number, _mix(key) % (self._spare + 1), FeistelPermutation(self.samples_per_epoch, key))

    def _span(self, i: int) -> tuple[list[int], int, int]:
        """Sample `i` in the stream: its documents, the first token in the first of them, the end in the last one."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.split_name} split, which has {len(self)}")
        number, place = divmod(i, self.samples_per_epoch)
        epoch = self._epoch
        if epoch.number != number:
            epoch = self._epoch = self._make_epoch(number)
        token = epoch.offset + epoch.order(place) * self.format.seq_length
        last_token = token + self.format.seq_length
        first, last = np.searchsorted(self._ends, [token, last_token], side="right").tolist()
        starts = [0 if document == 0 else int(self._ends[document - 1]) for document in (first, last)]
        documents = list(range(self._first + first, self._first + last + 1))
        return documents, token - starts[0], last_token + 1 - starts[1]


def _mix(word: int) -> int:
    """A scrambled 64-bit word: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    word = (word + 0x9E3779B97F4A7C15) & _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31
