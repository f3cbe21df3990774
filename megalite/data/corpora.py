"""From the settings of a run to its datasets on files: splits, blends, caches, and what is wrong with them.

Decisions
- Everything that only the files can tell (a split without documents, too little data, ids beyond the vocabulary) is
  found here, at the start, for all datasets of a split at once.
- Nothing here knows ranks or needs torch, so a machine without accelerators builds the same caches
  (`tools/build_index.py`).
- With weights, or as the only dataset, a dataset is repeated as often as the run needs. Without weights every dataset is read
  once, and a run that needs more is refused.
- A dataset given alone in a list of its own split is plain, whatever its weight says, as in Megatron.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from megalite.config import RunConfig
from megalite.config_data import Source, SplitName
from megalite.data.blend import (
    BlendedDataset,
    BlendIndices,
    blend_everything,
    blend_weighted,
    normalized,
    rounded_shares,
    sufficient_request,
)
from megalite.data.dataset_meta import DatasetMeta, read_meta
from megalite.data.feistel import FeistelDataset
from megalite.data.gpt_dataset import GPTDataset, check_corpus
from megalite.data.gpt_index import IndexSpec, plan_epochs
from megalite.data.indexed import IndexedDataset
from megalite.data.sample import SampleDataset, SampleFormat
from megalite.data.splits import split_ranges
from megalite.data.tokenizer import build_tokenizer
from megalite.errors import DataError, MegaliteError

__all__ = ["Corpora", "Part", "Split", "known_vocab_size"]

_FILES_PER_DATASET = 6  # .idx, .bin, three index arrays, one to spare
_OTHER_FILES = 256
_SHOWN_PROBLEMS = 20


class Part(NamedTuple):
    """What one dataset contributes to a split: `count` samples of `tokens` tokens that it has there."""

    prefix: str
    documents: int
    tokens: int
    count: int


@dataclass(frozen=True)
class Split:
    """The samples of one split, and where they come from."""

    name: SplitName
    dataset: SampleDataset
    parts: list[Part]
    seq_length: int

    def lines(self) -> list[str]:
        """A table: per dataset its share of the samples, the samples, and how often they go through its tokens."""
        total = sum(part.count for part in self.parts)
        rows = [f"{self.name}: {total:,} samples of {self.seq_length} tokens"]
        rows.append(f"  {'share':>7} {'samples':>14} {'epochs':>9} {'documents':>13} {'tokens':>16}  dataset")
        for part in self.parts:
            share, epochs = part.count / max(total, 1), part.count * self.seq_length / part.tokens
            rows.append(f"  {share:>7.2%} {part.count:>14,} {epochs:>9.2f} {part.documents:>13,} {part.tokens:>16,}  {part.prefix}")
        return rows


class _Corpus(NamedTuple):
    """A dataset's part of a split, before it is known how many samples are needed."""

    indexed: IndexedDataset
    sequences: tuple[int, int]
    tokens: int
    eod_id: int | None


class Corpora:
    """The splits of a run on files. Raises ConfigError and DataError from every method."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._data = config, config.data
        self._open = cache(IndexedDataset)
        self._tokenizer_eod = cache(self._read_tokenizer_eod)

    def split(self, name: SplitName, num_samples: int | None) -> Split:
        """Build a split of `num_samples` samples or a few more; None: everything once."""
        source = self._data.source(name)
        if source is None:
            raise DataError(f"there is no {name} data: set --{name}-data-path, or --data-path for all splits")
        _allow_open_files(len(source.prefixes))
        corpora = self._read(source, name)
        is_plain = len(source.prefixes) == 1 and (source.weights is None or self._data.has_own_splits)
        if is_plain or source.weights is None:
            dataset, counts = self._once(corpora, source, name, num_samples, is_plain)
        else:
            if num_samples is None:
                raise DataError(f"{name}: weights need a number of samples to be shares of; leave them out to read everything once")
            dataset, counts = self._weighted(corpora, source, name, num_samples)
        parts = [
            Part(prefix, corpus.sequences[1] - corpus.sequences[0], corpus.tokens, count)
            for prefix, corpus, count in zip(source.prefixes, corpora, counts, strict=True)
        ]
        return Split(name, dataset, parts, self._data.seq_length)

    def _once(
        self, corpora: list[_Corpus], source: Source, name: SplitName, num_samples: int | None, is_plain: bool
    ) -> tuple[SampleDataset, list[int]]:
        if is_plain:
            dataset = self._dataset(corpora[0], source.prefixes[0], name, num_samples)
            return dataset, [len(dataset) if num_samples is None else num_samples]
        datasets = [self._dataset(corpus, prefix, name, None) for prefix, corpus in zip(source.prefixes, corpora, strict=True)]
        lengths = [len(dataset) for dataset in datasets]
        if num_samples is not None and num_samples > sum(lengths):
            raise DataError(
                f"{name}: the run needs {num_samples:,} samples, but {len(lengths)} datasets without weights have {sum(lengths):,} in all "
                "and are read once: give them weights (which repeats them), more data, or train fewer steps"
            )
        directory = self._cache_dir(source.prefixes[0])
        indices = (
            blend_everything(lengths, directory) if num_samples is None else blend_weighted(normalized(lengths), num_samples, directory)
        )
        return BlendedDataset(datasets, indices), indices.counts(len(datasets))

    def _weighted(self, corpora: list[_Corpus], source: Source, name: SplitName, num_samples: int) -> tuple[SampleDataset, list[int]]:
        shares = normalized(source.weights or ())
        targets = rounded_shares(shares, num_samples)
        indices: BlendIndices = blend_weighted(shares, sum(targets), self._cache_dir(source.prefixes[0]))
        counts = indices.counts(len(corpora))
        datasets = []
        for prefix, corpus, target, count in zip(source.prefixes, corpora, targets, counts, strict=True):
            request = count
            if self._data.shuffle == "megatron":
                request = sufficient_request(target, count, partial(self._length_for, corpus))
            datasets.append(self._dataset(corpus, prefix, name, request))
        return BlendedDataset(datasets, indices), counts

    def _length_for(self, corpus: _Corpus, num_samples: int) -> int:
        spec = self._spec(corpus, num_samples)
        return plan_epochs(corpus.tokens, spec).num_samples

    def _spec(self, corpus: _Corpus, num_samples: int) -> IndexSpec:
        last = self._data.separate_last_epoch
        return IndexSpec(self._data.seq_length, num_samples, corpus.sequences, self._config.train.seed, separate_last_epoch=last)

    def _dataset(self, corpus: _Corpus, prefix: str, name: SplitName, num_samples: int | None) -> SampleDataset:
        data, seed = self._data, self._config.train.seed
        masks = {field: getattr(data, field) for field in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
        place = {"num_samples": num_samples, "sequence_range": corpus.sequences, "seed": seed, "split_name": name}
        if data.shuffle == "feistel":
            return FeistelDataset(corpus.indexed, SampleFormat(seq_length=data.seq_length, eod_id=corpus.eod_id, **masks), **place)
        return GPTDataset(
            corpus.indexed,
            seq_length=data.seq_length,
            eod_id=corpus.eod_id,
            cache_dir=self._cache_dir(prefix),
            separate_last_epoch=data.separate_last_epoch,
            **masks,
            **place,
        )

    def _cache_dir(self, prefix: str) -> Path:
        return Path(self._data.data_cache_path) if self._data.data_cache_path else Path(f"{prefix}_index_cache")

    def _read(self, source: Source, name: SplitName) -> list[_Corpus]:
        """Open the datasets of a split; raises one DataError for all that cannot be used."""
        metas = {prefix: read_meta(prefix) for prefix in source.prefixes}
        _check_same_ids(metas)
        return _collect([partial(self._corpus, prefix, metas[prefix], name) for prefix in source.prefixes])

    def _corpus(self, prefix: str, meta: DatasetMeta | None, name: SplitName) -> _Corpus:
        indexed = self._open(prefix)
        _check_vocabulary(prefix, meta, self._config.model.vocab_size)
        low, high = self._sequences(indexed, name)
        tokens = int(indexed.sizes[low:high].sum(dtype="int64"))
        if tokens == 0:
            raise DataError(f"{name} split of {prefix}: its {high - low} documents hold no token; use other data")
        return _Corpus(indexed, (low, high), tokens, self._tokenizer_eod() if meta is None else meta.eod_id)

    def _sequences(self, indexed: IndexedDataset, name: SplitName) -> tuple[int, int]:
        if self._data.has_own_splits:
            sequences = (0, len(indexed))
            check_corpus(indexed, sequences, name)
            return sequences
        split = self._data.split
        sequences = split_ranges(split, len(indexed))[name]
        if sequences is None or sequences[0] == sequences[1]:
            remedy = ", or --eval-interval None" if name == "valid" else ""
            raise DataError(
                f"the {name} split of {indexed.path_prefix} is empty: split {split} of {len(indexed)} documents; give it a larger share, "
                "use data with more documents (preprocess_data.py --document-separator cuts a text file into several), give each split "
                f"its own data (--{name}-data-path){remedy}"
            )
        return sequences

    def _read_tokenizer_eod(self) -> int | None:
        if self._data.tokenizer_type is None:
            return None
        return build_tokenizer(self._data.tokenizer_type, self._data.tokenizer_model).eod_id


def known_vocab_size(config: RunConfig) -> int | None:
    """The vocabulary of the tokenizer, else the largest of the datasets' side files, else None."""
    data = config.data
    if data.tokenizer_type is not None:
        return build_tokenizer(data.tokenizer_type, data.tokenizer_model).vocab_size
    sources = [data.source(name) for name in ("train", "valid", "test")]
    metas = [read_meta(prefix) for prefix in sorted({prefix for source in sources if source for prefix in source.prefixes})]
    return max((meta.vocab_size for meta in metas if meta is not None), default=None)


def _collect(calls: list[Callable[[], _Corpus]]) -> list[_Corpus]:
    """The results of all calls; raises one DataError with all their errors."""
    results, problems = [], []
    for call in calls:
        try:
            results.append(call())
        except MegaliteError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise DataError(problems[0])
    if problems:
        shown = [f"  {number}. {text}" for number, text in enumerate(problems[:_SHOWN_PROBLEMS], 1)]
        more = [f"  and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        raise DataError("\n".join([f"{len(problems)} of {len(calls)} datasets cannot be used:", *shown, *more]))
    return results


def _check_vocabulary(prefix: str, meta: DatasetMeta | None, vocab_size: int | None) -> None:
    """The largest id of the data must be a row of the embedding; files without a side file are trusted until an id is looked up."""
    if meta is not None and vocab_size is not None and meta.max_id >= vocab_size:
        raise DataError(
            f"{prefix} holds token {meta.max_id} (tokenizer {meta.tokenizer}, {meta.vocab_size} ids), but the model's vocab_size is "
            f"{vocab_size}: use the tokenizer that the data was made with, or --vocab-size {meta.vocab_size}"
        )


def _check_same_ids(metas: dict[str, DatasetMeta | None]) -> None:
    """Datasets of a blend must have been made with one vocabulary; the same id means other things in two."""
    makers: dict[tuple[int, int | None], str] = {}
    for prefix, meta in metas.items():
        if meta is not None:
            makers.setdefault(
                (meta.vocab_size, meta.eod_id), f"{prefix} ({meta.tokenizer}: {meta.vocab_size} ids, end of document {meta.eod_id})"
            )
    if len(makers) > 1:
        raise DataError(f"the datasets were made with different tokenizers: {', '.join(makers.values())}; preprocess them with one")


def _allow_open_files(num_datasets: int) -> None:
    """Raise this process's own limit of open files as far as a blend of so many datasets needs."""
    needed = num_datasets * _FILES_PER_DATASET + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise DataError(
            f"a blend of {num_datasets} datasets needs up to {needed} open files, the system allows {hard}: raise the limit (ulimit -n), "
            "or merge datasets (tools/merge_datasets.py)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
