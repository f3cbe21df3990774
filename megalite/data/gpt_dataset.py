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
from typing import Protocol

import numpy as np

from megalite.data.gpt_index import GPTIndices, IndexSpec, build_gpt_indices
from megalite.data.index_cache import cached_indices
from megalite.data.sample import Sample
from megalite.errors import ConfigError, DataError

__all__ = ["GPTDataset", "TokenSource"]


class TokenSource(Protocol):
    """What GPTDataset needs of a corpus: `IndexedDataset`, or a stand-in."""

    path_prefix: str
    dtype: np.dtype
    sizes: np.ndarray

    def __len__(self) -> int: ...

    def get(self, i: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...


class GPTDataset:
    """Samples of `seq_length` tokens from the sequences `sequence_range` of `indexed`.

    `num_samples`: at least so many samples, repeating the data as often as needed; None for one pass. The length is
    that of the whole passes, so it can be larger; within one pass the order does not depend on it. `cache_dir`: folder
    for the index arrays, None to build them in memory. `eod_id`: the token that ends a document, needed by
    `reset_position_ids` (positions restart after it) and `eod_mask_loss` (no loss where the input is it; the prediction
    of it keeps its loss). `add_extra_token` False makes samples that do not share a token; their last label is masked.
    `separate_last_epoch`: see `gpt_index.py`. `split_name` only names the split in messages.

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
        eod_mask_loss: bool = False,
        add_extra_token: bool = True,
        drop_last_partial: bool = True,
        separate_last_epoch: bool | None = None,
    ) -> None:
        self.indexed, self.seq_length, self.split_name, self.eod_id = indexed, seq_length, split_name, eod_id
        self.reset_position_ids, self.eod_mask_loss = reset_position_ids, eod_mask_loss
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
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of the {self.split_name} split, which has {len(self)}")
        stream = self._read(int(self.indices.shuffle_index[i]))
        num_inputs = min(len(stream), self.seq_length)
        num_labels = max(len(stream) - 1, 0)
        tokens, labels = np.zeros(self.seq_length, np.int64), np.zeros(self.seq_length, np.int64)
        tokens[:num_inputs] = stream[:num_inputs]
        labels[:num_labels] = stream[1:]
        loss_mask = np.zeros(self.seq_length, np.float32)
        loss_mask[:num_labels] = 1.0
        position_ids = np.arange(self.seq_length, dtype=np.int64)
        if self.eod_mask_loss or self.reset_position_ids:
            ends = np.flatnonzero(tokens[:num_inputs] == self.eod_id)
            if self.eod_mask_loss:
                loss_mask[ends] = 0.0
            if self.reset_position_ids:
                position_ids -= _document_starts(ends, self.seq_length)
        return Sample(tokens, labels, loss_mask, position_ids)

    def _read(self, sample: int) -> np.ndarray:
        """The tokens of stream sample `sample`: int64, at most seq_length + extra of them."""
        (first, start), (last, end) = self.indices.sample_index[sample : sample + 2].tolist()
        documents = self.indices.document_index[first : last + 1].tolist()
        pieces: list[np.ndarray] = []
        for position, document in enumerate(documents, start=first):
            # A border one before the start of an empty document is legal at the very end of the data.
            offset = max(start, 0) if position == first else 0
            stop = end + self._extra if position == last else int(self.indexed.sizes[document])
            pieces.append(self.indexed.get(document, offset, max(stop - offset, 0)))
        return np.concatenate(pieces, dtype=np.int64)

    def _indices(self, spec: IndexSpec, cache_dir: Path | None) -> GPTIndices:
        sizes = self.indexed.sizes
        if cache_dir is None:
            return build_gpt_indices(sizes, spec)
        return cached_indices(Path(cache_dir), self.indexed.path_prefix, spec, lambda: build_gpt_indices(sizes, spec))

    def _check(self, spec: IndexSpec) -> None:
        low, high = spec.sequence_range
        num_sequences, where = len(self.indexed), f"{self.split_name} split of {self.indexed.path_prefix}"
        if self.indexed.dtype.kind not in "iu":
            raise DataError(f"{where}: it holds {self.indexed.dtype.name} numbers, not token ids")
        if not 0 <= low <= high <= num_sequences:
            raise DataError(f"{where}: sequences {low} to {high} were asked for, it has {num_sequences}")
        if low == high:
            raise DataError(
                f"{where}: none of its {num_sequences} sequences falls into this split; give the split a larger share, "
                "or use data with more documents"
            )
        violations = _settings_violations(spec)
        if self.eod_id is None and (self.reset_position_ids or self.eod_mask_loss):
            violations.append("resetting position ids or masking the loss after documents needs the end-of-document id")
        if violations:
            raise ConfigError([f"{where}: {violation}" for violation in violations])


def _settings_violations(spec: IndexSpec) -> list[str]:
    violations = []
    if spec.seq_length < 1:
        violations.append(f"sequence length is {spec.seq_length}, it must be at least 1")
    if spec.num_samples is not None and spec.num_samples < 0:
        violations.append(f"{spec.num_samples} samples were asked for; the number must not be negative")
    if not 0 <= spec.seed < 2**32:
        violations.append(f"seed is {spec.seed}, it must lie in [0, 2^32)")
    return violations


def _document_starts(ends: np.ndarray, length: int) -> np.ndarray:
    """For every position the start of its document, [length], from the positions of the end-of-document tokens."""
    starts = np.zeros(length, dtype=np.int64)
    inner = ends[ends + 1 < length] + 1
    starts[inner] = inner
    return np.maximum.accumulate(starts)
