"""One step's micro-batches for one data-parallel rank, as tensors.

The loader holds a single number, `consumed_samples`; `sampler.py` turns it into sample numbers. So to resume is to pass
that number, and nothing about the data has to be saved. While a step computes, one thread reads the samples of the next
step; what goes wrong there is raised by the call that wants the result.

S sequence, B micro-batch.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from megalite.data.batch import MicroBatch
from megalite.data.sample import Sample, SampleDataset
from megalite.data.sampler import MicroBatchSamples, num_local_micro_batches, step_micro_batches
from megalite.errors import ConfigError, DataError

__all__ = ["GlobalBatchLoader", "MicroBatchArrays"]


@dataclass(frozen=True, kw_only=True)
class MicroBatchArrays(MicroBatch):
    """A micro-batch on the CPU that knows its number `index` (k) within the global batch: the same in every layout."""

    index: int


class GlobalBatchLoader:
    """Micro-batches of successive global batches of `dataset`, those of rank `dp_rank` of `dp_size`.

    `consumed_samples`: where to start, the whole run's count over all ranks. `prefetch` reads one step ahead in a
    thread; leave the loader as a context manager, or call `close`, to end it.

    Raises ConfigError for sizes that do not fit together, DataError (from `batch` and `next_step`) when the data ends.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        prefetch: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        self.num_micro_batches = num_local_micro_batches(global_batch_size, micro_batch_size, dp_size)
        if not 0 <= dp_rank < dp_size or consumed_samples < 0:
            raise ConfigError(f"there is no data-parallel rank {dp_rank} of {dp_size} after {consumed_samples} samples")
        self.dataset, self.consumed_samples = dataset, consumed_samples
        self.micro_batch_size, self.global_batch_size = micro_batch_size, global_batch_size
        self.dp_rank, self.dp_size, self.vocab_size = dp_rank, dp_size, vocab_size
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="megalite-data") if prefetch else None
        self._ahead: tuple[int, Future[list[MicroBatchArrays]]] | None = None

    @property
    def num_steps_left(self) -> int:
        """Whole global batches between `consumed_samples` and the end of the dataset."""
        return max(0, len(self.dataset) - self.consumed_samples) // self.global_batch_size

    def __enter__(self) -> GlobalBatchLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def next_step(self) -> list[MicroBatchArrays]:
        """The micro-batches of the next step in order, [num_micro_batches]; advances `consumed_samples`.

        An error leaves the position where it was.
        """
        start = self.consumed_samples
        ahead, self._ahead = self._ahead, None
        # Somebody may have set consumed_samples since the read-ahead began; then its result is for nobody.
        batches = ahead[1].result() if ahead is not None and ahead[0] == start else self.batch(start)
        self.consumed_samples = start + self.global_batch_size
        if self._executor is not None and self.num_steps_left:
            self._ahead = (self.consumed_samples, self._executor.submit(self.batch, self.consumed_samples))
        return batches

    def batch(self, consumed_samples: int) -> list[MicroBatchArrays]:
        """The micro-batches of the step that starts at `consumed_samples`; changes nothing."""
        end = consumed_samples + self.global_batch_size
        if end > len(self.dataset):
            raise DataError(
                f"the next step needs samples {consumed_samples} to {end}, but the dataset has {len(self.dataset)}: "
                "build it for more samples, or train fewer steps"
            )
        micro_batches = step_micro_batches(
            consumed_samples,
            global_batch_size=self.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )
        return [self._collate(micro_batch) for micro_batch in micro_batches]

    def close(self) -> None:
        """End the reading thread; the loader still works, without reading ahead."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = self._ahead = None

    def _collate(self, micro_batch: MicroBatchSamples) -> MicroBatchArrays:
        samples = [self.dataset[i] for i in micro_batch.samples]
        fields = {name: _stack(samples, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}
        if self.vocab_size is not None:
            _check_ids((fields["tokens"], fields["labels"]), self.vocab_size, micro_batch.samples)
        return MicroBatchArrays(**fields, first_sample=micro_batch.samples.start, index=micro_batch.index)


def _stack(samples: list[Sample], name: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))


def _check_ids(tensors: tuple[torch.Tensor, ...], vocab_size: int, samples: range) -> None:
    low = min(int(ids.min()) for ids in tensors)
    high = max(int(ids.max()) for ids in tensors)
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"samples {samples.start} to {samples.stop - 1} hold token ids from {low} to {high}, but the vocabulary has ids 0 to "
            f"{vocab_size - 1}: train with the tokenizer that the data was made with, or with --vocab-size {high + 1}"
        )
