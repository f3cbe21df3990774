"""Which text a step trained on, and when a text is trained on: both directions, from a run's configuration alone.

The order of the data is a function of the configuration, so nothing has to be recorded while training: the datasets are
built again, from the same index cache, and asked. A sample reads its tokens from one or more sequences; the unit here is
a `Use`, the part of one sequence in one sample.

A sample of S inputs reads S + 1 tokens. Token 0 of them is the first input, token t > 0 is the label of input t - 1, and
an input itself up to token S - 1: a `Use` at position S is a label only, and the same token is the first input of the
sample that follows in the stream.

What it cannot know: a run that was continued with another batch size or other data has no single configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, cast

import numpy as np

from megalite.batch_sizes import BatchSizes
from megalite.config import RunConfig
from megalite.config_data import SplitName
from megalite.data.blend import BlendedDataset
from megalite.data.corpora import Corpora
from megalite.data.indexed import IndexedDataset
from megalite.data.sample import Piece
from megalite.errors import ConfigError, DataError

__all__ = ["Provenance", "Use"]


class Use(NamedTuple):
    """Tokens [start, stop) of `sequence`, bytes [first_byte, end_byte) of `dataset`.bin, and where a run reads them.

    `dataset` is its prefix, `document` the number of the document that the sequence belongs to. `step` counts from 1 as
    in the log; of validation and test it is the number of the batch within an evaluation. `micro_batch` and `row` count
    from 0 within the global batch, whatever the layout; `position` is the place of token `start` in the sample.
    """

    step: int
    micro_batch: int
    row: int
    sample: int
    position: int
    dataset: str
    document: int
    sequence: int
    start: int
    stop: int
    first_byte: int
    end_byte: int


class _Traced(Protocol):
    indexed: IndexedDataset

    def pieces(self, i: int) -> list[Piece]: ...
    def samples_with(self, sequence: int) -> list[int]: ...


@dataclass(frozen=True)
class Provenance:
    """The samples of one split of a run, `num_samples` of them, in steps of `batch_sizes`."""

    dataset: _Traced | BlendedDataset
    batch_sizes: BatchSizes
    micro_batch_size: int
    num_samples: int

    @classmethod
    def of_run(cls, config: RunConfig, split: SplitName = "train", world_size: int | None = None) -> Provenance:
        """Of a saved configuration. `world_size` is needed only where the global batch size follows from it.

        Raises ConfigError where the configuration does not say enough, DataError where its data cannot be read.
        """
        if config.data.mock_data:
            raise ConfigError("the run was trained on mock_data: pseudo-random tokens, which come from no document")
        if config.train.global_batch_size is None and world_size is None:
            raise ConfigError("the configuration does not set global_batch_size: give the number of ranks of the run (--world-size)")
        sizes = config.batch_sizes(world_size or 1)
        num_samples = config.num_samples(sizes.full).get(split)
        if num_samples is None:
            raise ConfigError(f"the run does not read its {split} split: it has no eval_interval or no {split}_data_path")
        dataset = cast(_Traced | BlendedDataset, Corpora(config).split(split, num_samples).dataset)
        sizes = sizes if split == "train" else BatchSizes(sizes.full)
        return cls(dataset, sizes, config.train.micro_batch_size, num_samples)

    @property
    def num_steps(self) -> int:
        """Steps of the run, or batches of an evaluation."""
        return self.batch_sizes.step_of(self.num_samples - 1) + 1

    @cached_property
    def sources(self) -> list[IndexedDataset]:
        """The token files, in the order of the blend."""
        datasets = self.dataset.datasets if isinstance(self.dataset, BlendedDataset) else [self.dataset]
        return [cast(_Traced, dataset).indexed for dataset in datasets]

    def of_step(self, step: int, micro_batch: int | None = None) -> list[Use]:
        """What step `step` (from 1) reads, or only its micro-batch `micro_batch` (from 0), in order. Raises DataError."""
        if not 1 <= step <= self.num_steps:
            raise DataError(f"there is no step {step}: this split has steps 1 to {self.num_steps}")
        samples = range(self.batch_sizes.consumed_before(step - 1), self.batch_sizes.consumed_before(step))
        if micro_batch is not None:
            size = self.micro_batch_size
            if not 0 <= micro_batch < len(samples) // size:
                raise DataError(f"step {step} has micro-batches 0 to {len(samples) // size - 1}, not {micro_batch}")
            samples = samples[micro_batch * size : (micro_batch + 1) * size]
        return [use for sample in samples for use in self.of_sample(sample)]

    def of_sample(self, sample: int) -> list[Use]:
        """What sample `sample` (from 0, in the order of the run) reads, in order. Raises DataError."""
        if not 0 <= sample < self.num_samples:
            raise DataError(f"there is no sample {sample}: this split has samples 0 to {self.num_samples - 1}")
        step = self.batch_sizes.step_of(sample)
        micro_batch, row = divmod(sample - self.batch_sizes.consumed_before(step), self.micro_batch_size)
        uses, position, sources = [], 0, self.sources
        for sequence, start, stop, number in self.dataset.pieces(sample):
            source = sources[number]
            document = int(np.searchsorted(source.document_indices, sequence, side="right")) - 1
            first_byte, end_byte = (int(source.pointers[sequence]) + token * source.dtype.itemsize for token in (start, stop))
            place = (step + 1, micro_batch, row, sample, position, source.path_prefix)
            uses.append(Use(*place, document, sequence, start, stop, first_byte, end_byte))
            position += stop - start
        return uses

    def of_document(self, document: int, dataset: str | None = None) -> list[Use]:
        """Every use of `document` in the run, in the order of training; empty where it is in another split or never read.

        `dataset` is the prefix, needed in a blend. Raises DataError for a dataset or a document that does not exist.
        """
        sources = self.sources
        prefixes = [source.path_prefix for source in sources]
        if dataset is None and len(set(prefixes)) > 1:
            raise DataError(f"the run blends {len(prefixes)} datasets: say of which one document {document} is")
        numbers = [number for number, prefix in enumerate(prefixes) if dataset in (None, prefix)]
        if not numbers:
            raise DataError(f"the run has no dataset {dataset}; it has {', '.join(prefixes[:10])}{', ...' if len(prefixes) > 10 else ''}")
        bounds = sources[numbers[0]].document_indices
        if not 0 <= document < len(bounds) - 1:
            raise DataError(f"{prefixes[numbers[0]]} has documents 0 to {len(bounds) - 2}, not {document}")
        sequences = range(int(bounds[document]), int(bounds[document + 1]))
        samples = {sample for sequence in sequences for number in numbers for sample in self._samples_with(sequence, number)}
        uses = [use for sample in sorted(samples) if sample < self.num_samples for use in self.of_sample(sample)]
        return [use for use in uses if use.sequence in sequences and use.dataset == prefixes[numbers[0]]]

    def _samples_with(self, sequence: int, number: int) -> list[int]:
        if isinstance(self.dataset, BlendedDataset):
            return self.dataset.samples_with(sequence, number)
        return self.dataset.samples_with(sequence)

    def tokens(self, use: Use) -> np.ndarray:
        """The token ids of `use`, a view of the file."""
        source = next(source for source in self.sources if source.path_prefix == use.dataset)
        return source.get(use.sequence, use.start, use.stop - use.start)
