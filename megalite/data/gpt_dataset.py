"""Language-model samples of fixed length from an indexed corpus.

Sequences of the corpus ("documents" below) are shuffled, laid end to end and cut every `seq_length` tokens;
`gpt_index.py` decides the order. A sample reads seq_length + 1 tokens: inputs are the first seq_length, labels the
last, so its last label is the first input of the next sample of the stream. Samples start and end in the middle of
documents.

>>> import tempfile
>>> from megalite.data import GPTDataset, IndexedDataset, IndexedDatasetWriter
>>> folder = tempfile.TemporaryDirectory()
>>> with IndexedDatasetWriter(f"{folder.name}/tiny", "uint16") as writer:
...     for document in ([11, 12, 13, 0], [21, 22, 0], [31, 32, 33, 34, 0]):
...         writer.add_document(document)
>>> corpus = IndexedDataset(f"{folder.name}/tiny")
>>> data = GPTDataset(
...     corpus, seq_length=5, num_samples=None, sequence_range=(0, 3), seed=1, split_name="train", cache_dir=None
... )

The shuffled documents are 0, 2, 1, so the stream is 11 12 13 0 31 32 33 34 0 21 22 0. It has 12 tokens, which makes
(12 - 1) // 5 = 2 samples: the second begins at token 5, which is offset 1 of the second document of the stream. The
samples are shuffled as well.

>>> data.indices.document_index.tolist(), data.indices.sample_index.tolist(), data.indices.shuffle_index.tolist()
([0, 2, 1], [[0, 0], [1, 1], [2, 1]], [1, 0])
>>> data[0].tokens.tolist(), data[0].labels.tolist()
([32, 33, 34, 0, 21], [33, 34, 0, 21, 22])
>>> data[1].tokens.tolist(), data[1].labels.tolist()
([11, 12, 13, 0, 31], [12, 13, 0, 31, 32])
>>> folder.cleanup()

Padding exists only in the last sample, and only when `drop_last_partial` is off or no extra token is read. It is masked
by position: its inputs and labels are 0 with loss mask 0, and no id of the data is ever rewritten or masked for its
value.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalite.data.gpt_index import GPTIndices, IndexSpec, build_gpt_indices
from megalite.data.index_cache import cached_indices
from megalite.data.sample import Piece, Sample, SampleFormat, TokenSource, read_stream, stream_pieces
from megalite.errors import ConfigError, DataError

__all__ = ["GPTDataset", "check_corpus"]


class GPTDataset:
    """Samples of `seq_length` tokens from the sequences `sequence_range` of `indexed`.

    `num_samples`: at least so many samples, repeating the data as often as needed; None for one pass. The length is
    that of the whole passes, so it can be larger; within one pass the order does not depend on it. `cache_dir`: folder
    for the index arrays, None to build them in memory. `eod_id`, `reset_position_ids`, `reset_attention_mask` and
    `eod_mask_loss`: see `SampleFormat`. `add_extra_token` False makes samples that do not share a token; their last label
    is masked. `separate_last_epoch`: see `gpt_index.py`. `split_name` only names the split in messages.

    Raises ConfigError for settings that contradict each other, DataError when the data makes no sample.
    """

    def __init__(
        self,
        indexed: TokenSource,
        *,
        seq_length: int,
        num_samples: int | None,
        sequence_range: tuple[int, int],
        seed: int,
        split_name: str,
        cache_dir: Path | None = None,
        eod_id: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        add_extra_token: bool = True,
        drop_last_partial: bool = True,
        separate_last_epoch: bool | None = None,
    ) -> None:
        self.indexed, self.split_name = indexed, split_name
        self.format = SampleFormat(
            seq_length=seq_length,
            eod_id=eod_id,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
        )
        low, high = (int(bound) for bound in sequence_range)
        self._extra = int(add_extra_token)
        spec = IndexSpec(seq_length, num_samples, (low, high), seed, add_extra_token, drop_last_partial, separate_last_epoch)
        self._check(spec)
        try:
            self.indices = self._indices(spec, cache_dir)
        except DataError as error:
            raise DataError(f"{split_name} split of {indexed.path_prefix}: {error}") from error

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.indices.shuffle_index)

    def __getitem__(self, i: int) -> Sample:
        """Sample `i`, in fresh arrays. Raises IndexError beyond the end."""
        return self.format.sample(read_stream(self.indexed, *self._span(i)))

    def pieces(self, i: int) -> list[Piece]:
        """Where the tokens of sample `i` lie, in order: seq_length + extra in all, fewer where it is padded."""
        return [piece for piece in stream_pieces(self.indexed, *self._span(i)) if piece.stop > piece.start]

    def samples_with(self, sequence: int) -> list[int]:
        """The samples that read any token of `sequence`, ascending. Takes one pass over documents and samples, none over tokens."""
        document_index, sample_index, shuffle_index = self.indices
        positions = np.flatnonzero(document_index == sequence)
        if len(positions) == 0 or self.indexed.sizes[sequence] == 0:
            return []
        border_positions, borders = np.ascontiguousarray(sample_index[:, 0]), positions.astype(sample_index.dtype)
        # Of the samples that reach a position, all but the outer ones read its document for certain.
        firsts = np.maximum(np.searchsorted(border_positions, borders, side="left") - 1, 0)
        lasts = np.minimum(np.searchsorted(border_positions, borders, side="right"), len(self))
        is_read = np.zeros(len(self), dtype=bool)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            is_read[first:last] = True
        return [i for i in np.flatnonzero(is_read[shuffle_index]).tolist() if any(piece.sequence == sequence for piece in self.pieces(i))]

    def _span(self, i: int) -> tuple[list[int], int, int]:
        """Sample `i` in the stream: its documents, the first token in the first of them, the end in the last one."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.split_name} split, which has {len(self)}")
        sample = int(self.indices.shuffle_index[i])
        (first, start), (last, end) = self.indices.sample_index[sample : sample + 2].tolist()
        documents = self.indices.document_index[first : last + 1].tolist()
        # A border one before the start of an empty document is legal at the very end of the data.
        return documents, max(start, 0), end + self._extra

    def _indices(self, spec: IndexSpec, cache_dir: Path | None) -> GPTIndices:
        sizes = self.indexed.sizes
        if cache_dir is None:
            return build_gpt_indices(sizes, spec)
        return cached_indices(Path(cache_dir), self.indexed.path_prefix, spec, lambda: build_gpt_indices(sizes, spec))

    def _check(self, spec: IndexSpec) -> None:
        where = f"{self.split_name} split of {self.indexed.path_prefix}"
        check_corpus(self.indexed, spec.sequence_range, self.split_name)
        violations = self.format.violations()
        if spec.num_samples is not None and spec.num_samples < 0:
            violations.append(f"{spec.num_samples} samples were asked for; the number must not be negative")
        if not 0 <= spec.seed < 2**32:
            violations.append(f"seed is {spec.seed}, it must lie in [0, 2^32)")
        if violations:
            raise ConfigError([f"{where}: {violation}" for violation in violations])


def check_corpus(indexed: TokenSource, sequence_range: tuple[int, int], split_name: str) -> None:
    """Raises DataError unless the range holds sequences of token ids."""
    (low, high), num_sequences, where = sequence_range, len(indexed), f"{split_name} split of {indexed.path_prefix}"
    if indexed.dtype.kind not in "iu":
        raise DataError(f"{where}: it holds {indexed.dtype.name} numbers, not token ids")
    if not 0 <= low <= high <= num_sequences:
        raise DataError(f"{where}: sequences {low} to {high} were asked for, it has {num_sequences}")
    if low == high:
        raise DataError(
            f"{where}: none of its {num_sequences} sequences falls into this split; give the split a larger share, "
            "or use data with more documents"
        )
