"""The order of the training data: from document sizes, a seed and a number of samples to three index arrays.

    document_index [E * documents]   documents in reading order over E epochs, shuffled
    sample_index   [n + 1, 2]        where each sample of that stream starts: (position in document_index, token offset)
    shuffle_index  [n]               sample i of the dataset is sample shuffle_index[i] of the stream

Everything is drawn from one `RandomState(seed)` in a fixed order, so the arrays equal Megatron's to the last bit, and
they depend on nothing else: not on ranks, not on the batch size.

The last epoch. When the run needs only part of it (under 80 percent), that epoch is shuffled apart from the others:
otherwise documents would be missing from the middle of the run and not from its end. The price is that the documents of
the last epoch come as one block, which can show as a small step in the training loss. `separate_last_epoch` decides
otherwise.

Speed. The document shuffle comes first. After it the generator's state is known, so the samples are shuffled while
another thread cuts the documents into samples.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from megalite.data.index_builder import LegacyRandom, build_sample_index, legacy_random
from megalite.errors import DataError

__all__ = ["EpochPlan", "GPTIndices", "IndexSpec", "build_gpt_indices", "plan_epochs"]

_LAST_EPOCH_SHARE = 0.80
_SAMPLES_WORTH_A_THREAD = 1 << 16
_UINT32_LIMIT = np.iinfo(np.uint32).max - 1


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """All settings that the index arrays depend on, besides the sizes of the sequences.

    `sequence_range` half-open; `num_samples` None for exactly one epoch; `add_extra_token` reads seq_length + 1 tokens
    per sample; `drop_last_partial` False keeps a short last sample; `separate_last_epoch` None applies the 80 percent
    rule.
    """

    seq_length: int
    num_samples: int | None
    sequence_range: tuple[int, int]
    seed: int
    add_extra_token: bool = True
    drop_last_partial: bool = True
    separate_last_epoch: bool | None = None


class GPTIndices(NamedTuple):
    """The three arrays of the module's head."""

    document_index: np.ndarray
    sample_index: np.ndarray
    shuffle_index: np.ndarray


class EpochPlan(NamedTuple):
    """How often the documents are read, and how many samples the stream has.

    `num_samples_before_last` is the sample at which a separately shuffled last epoch begins, else None.
    """

    num_epochs: int
    num_samples: int
    num_samples_before_last: int | None


def build_gpt_indices(sizes: np.ndarray, spec: IndexSpec) -> GPTIndices:
    """The index arrays for the sequences of `spec.sequence_range`; `sizes` [S] are the sizes of *all* sequences.

    document_index is int32, sample_index int32, shuffle_index uint32, each int64 where counts need it.
    Raises DataError when the range holds no tokens, or too few for one sample.
    """
    low, high = spec.sequence_range
    plan = plan_epochs(int(np.sum(sizes[low:high], dtype=np.int64)), spec)
    random, before_last = legacy_random(spec.seed), plan.num_samples_before_last
    documents = np.arange(low, high, dtype=np.int64 if high > np.iinfo(np.int32).max else np.int32)
    document_index = np.empty((plan.num_epochs, high - low), dtype=documents.dtype)
    document_index[:] = documents
    document_index = document_index.reshape(-1)
    _shuffle_parts(document_index, 0 if before_last is None else len(document_index) - len(documents), random)
    dtype = np.int64 if plan.num_samples >= _UINT32_LIMIT else np.uint32
    shuffle_index = np.arange(plan.num_samples, dtype=dtype)
    cut = partial(build_sample_index, sizes, document_index, spec.seq_length, plan.num_samples, spec.add_extra_token)
    if plan.num_samples < _SAMPLES_WORTH_A_THREAD:
        _shuffle_parts(shuffle_index, before_last or 0, random)
        return GPTIndices(document_index, cut(), shuffle_index)
    with ThreadPoolExecutor(1) as executor:
        borders = executor.submit(cut)
        _shuffle_parts(shuffle_index, before_last or 0, random)
        return GPTIndices(document_index, borders.result(), shuffle_index)


def plan_epochs(tokens_per_epoch: int, spec: IndexSpec) -> EpochPlan:
    """Epochs and samples for a range of `tokens_per_epoch` tokens. Raises DataError when that makes no sample."""
    extra, seq_length = int(spec.add_extra_token), spec.seq_length
    low, high = spec.sequence_range
    found = f"sequences {low} to {high} hold {tokens_per_epoch} tokens"
    if tokens_per_epoch == 0:
        raise DataError(f"{found}: no sample can be made; give this split a larger share or more documents")
    num_epochs = 1
    if spec.num_samples is not None:
        wanted_tokens = spec.num_samples * seq_length + extra
        num_epochs = max(1, -(-wanted_tokens // tokens_per_epoch))
    num_samples = _count_samples(num_epochs * tokens_per_epoch - extra, spec)
    if num_samples == 0:
        raise DataError(
            f"{found}, one sample of sequence length {seq_length} needs {seq_length + extra}: use a shorter sequence, "
            "more documents, or ask for a number of samples, which repeats the data"
        )
    return EpochPlan(num_epochs, num_samples, _separate_from(num_epochs, tokens_per_epoch, spec))


def _count_samples(usable_tokens: int, spec: IndexSpec) -> int:
    if spec.drop_last_partial:
        return usable_tokens // spec.seq_length
    # Single precision on purpose: it decides the count, hence the shuffle, where files are shared with Megatron. Above
    # 2^24 tokens it can be a few samples off; extra ones hold no label and are masked, missing ones are at the end.
    return int(np.ceil(np.float32(usable_tokens) / np.float32(spec.seq_length)))


def _separate_from(num_epochs: int, tokens_per_epoch: int, spec: IndexSpec) -> int | None:
    """The sample at which a separately shuffled last epoch begins, or None for one shuffle over all epochs."""
    if num_epochs == 1 or spec.num_samples is None or spec.separate_last_epoch is False:
        return None
    extra = int(spec.add_extra_token)
    before_last = ((num_epochs - 1) * tokens_per_epoch - extra) // spec.seq_length
    from_last = spec.num_samples - before_last
    per_epoch = (tokens_per_epoch - extra) // spec.seq_length
    assert 0 <= from_last <= per_epoch + 1, (from_last, per_epoch)
    if spec.separate_last_epoch or from_last < int(_LAST_EPOCH_SHARE * per_epoch):
        return before_last
    return None


def _shuffle_parts(values: np.ndarray, border: int, random: LegacyRandom) -> None:
    """Shuffle what is before `border`, then what is after it, in place."""
    random.shuffle(values[:border])
    random.shuffle(values[border:])
