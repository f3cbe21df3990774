"""One step's micro-batches for one data-parallel rank, as tensors.

Decisions
- The loader holds a single number, `consumed_samples`; `sampler.py` turns it into sample numbers. So to resume is to pass that number,
  in any layout, and nothing about the data has to be saved.
- While a step computes, threads read the micro-batches of the next one: threads and not processes, because the samples are copies of
  a memory-mapped file, which needs no Python for long, and because a thread cannot be left behind. Each reads whole micro-batches and
  waits for nobody, so they cannot wait for each other.
- What goes wrong in a thread is raised by the call that wants the result. That call leaves the position where it was.
- For a GPU the tensors lie in page-locked memory, written there by the threads, so that the copy to the device does not wait.

S sequence, B micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megalite.batch_sizes import BatchSizes
from megalite.data.batch import MicroBatch
from megalite.data.sample import Sample, SampleDataset
from megalite.data.sampler import MicroBatchSamples, num_local_micro_batches, step_micro_batches
from megalite.errors import ConfigError, DataError

__all__ = ["GlobalBatchLoader", "MicroBatchArrays"]


@dataclass(frozen=True, kw_only=True)
class MicroBatchArrays(MicroBatch):
    """A micro-batch on the CPU that knows its number `index` (k) within the global batch: the same in every layout."""

    index: int


class _Ahead(NamedTuple):
    """The step that is being read, of the samples from `start` on."""

    start: int
    micro_batches: list[Future[MicroBatchArrays]]


class GlobalBatchLoader:
    """Micro-batches of successive global batches of `dataset`, those of rank `dp_rank` of `dp_size`.

    `global_batch_size`: one number, or the sizes of a ramp. `consumed_samples`: where to start, the whole run's count over
    all ranks; may be set. `num_workers`: threads that read one step ahead; 0 for none. Leave the loader as a context
    manager, or call `close`, to end them. `vocab_size`: refuse ids beyond it. `pin_memory`: page-locked tensors, needs CUDA.

    Raises ConfigError for sizes that do not fit together, DataError (from `batch` and `next_step`) when the data ends.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        global_batch_size: int | BatchSizes,
        dp_rank: int = 0,
        dp_size: int = 1,
        consumed_samples: int = 0,
        num_workers: int = 1,
        vocab_size: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        self.batch_sizes = BatchSizes(global_batch_size) if isinstance(global_batch_size, int) else global_batch_size
        for size in self.batch_sizes.possible:
            num_local_micro_batches(size, micro_batch_size, dp_size)
        if not 0 <= dp_rank < dp_size or consumed_samples < 0:
            raise ConfigError(f"there is no data-parallel rank {dp_rank} of {dp_size} after {consumed_samples} samples")
        self.dataset, self.consumed_samples, self.micro_batch_size = dataset, consumed_samples, micro_batch_size
        self.dp_rank, self.dp_size, self.vocab_size, self.pin_memory = dp_rank, dp_size, vocab_size, pin_memory
        self._executor = ThreadPoolExecutor(num_workers, thread_name_prefix="megalite-data") if num_workers else None
        self._ahead: _Ahead | None = None

    @property
    def num_steps_left(self) -> int:
        """Whole global batches between `consumed_samples` and the end of the dataset."""
        return self.batch_sizes.num_steps(self.consumed_samples, len(self.dataset))

    def __enter__(self) -> GlobalBatchLoader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close()

    def next_step(self) -> list[MicroBatchArrays]:
        """The micro-batches of the next step in order, [size of the step / (micro-batch size x dp)]; advances `consumed_samples`.

        An error leaves the position where it was.
        """
        start = self.consumed_samples
        ahead, self._ahead = self._ahead, None
        # Somebody may have set consumed_samples since the read-ahead began; then its result is for nobody.
        if ahead is not None and ahead.start == start:
            micro_batches = [future.result() for future in ahead.micro_batches]
        else:
            micro_batches = self.batch(start)
        self.consumed_samples = start + self.batch_sizes.at(start)
        self._read_ahead()
        return micro_batches

    def batch(self, consumed_samples: int) -> list[MicroBatchArrays]:
        """The micro-batches of the step that starts at `consumed_samples`; changes nothing."""
        end = consumed_samples + self.batch_sizes.at(consumed_samples)
        if end > len(self.dataset):
            raise DataError(
                f"the next step needs samples {consumed_samples} to {end}, but the dataset has {len(self.dataset)}: "
                "build it for more samples, or train fewer steps"
            )
        return [self._collate(micro_batch) for micro_batch in self._micro_batches(consumed_samples)]

    def close(self) -> None:
        """End the reading threads; the loader still works, without reading ahead."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
        self._executor = self._ahead = None

    def _read_ahead(self) -> None:
        start = self.consumed_samples
        if self._executor is not None and start + self.batch_sizes.at(start) <= len(self.dataset):
            self._ahead = _Ahead(start, [self._executor.submit(self._collate, micro_batch) for micro_batch in self._micro_batches(start)])

    def _micro_batches(self, consumed_samples: int) -> list[MicroBatchSamples]:
        return step_micro_batches(
            consumed_samples,
            global_batch_size=self.batch_sizes.at(consumed_samples),
            micro_batch_size=self.micro_batch_size,
            dp_rank=self.dp_rank,
            dp_size=self.dp_size,
        )

    def _collate(self, micro_batch: MicroBatchSamples) -> MicroBatchArrays:
        samples = [self.dataset[i] for i in micro_batch.samples]
        fields = {name: self._stack(samples, name) for name in ("tokens", "labels", "loss_mask", "position_ids")}
        if samples[0].document_ids is not None:
            fields["document_ids"] = self._stack(samples, "document_ids")
        if samples[0].reference is not None:
            fields["reference"] = torch.tensor([sample.reference for sample in samples], dtype=torch.float32, pin_memory=self.pin_memory)
        if self.vocab_size is not None:
            _check_ids((fields["tokens"], fields["labels"]), self.vocab_size, micro_batch.samples)
        return MicroBatchArrays(**fields, first_sample=micro_batch.samples.start, index=micro_batch.index)

    def _stack(self, samples: Sequence[Sample], name: str) -> torch.Tensor:
        """[B, S]"""
        rows = [torch.from_numpy(getattr(sample, name)) for sample in samples]
        out = torch.empty((len(rows), *rows[0].shape), dtype=rows[0].dtype, pin_memory=self.pin_memory)
        return torch.stack(rows, out=out)


def _check_ids(tensors: tuple[torch.Tensor, ...], vocab_size: int, samples: range) -> None:
    low = min(int(ids.min()) for ids in tensors)
    high = max(int(ids.max()) for ids in tensors)
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"samples {samples.start} to {samples.stop - 1} hold token ids from {low} to {high}, but the vocabulary has ids 0 to "
            f"{vocab_size - 1}: train with the tokenizer that the data was made with, or with --vocab-size {high + 1}"
        )
