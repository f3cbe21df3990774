"""Which samples a data-parallel rank reads in a step: arithmetic on `consumed_samples`, without any state.

A global batch is the samples [consumed, consumed + global_batch_size), whatever the layout. It is cut into global
micro-batches: number k holds [consumed + k * mbs, consumed + (k + 1) * mbs). Rank r of d takes k = r, d + r, 2d + r,
..., which are its local micro-batches j = 0, 1, 2, ... So the layout decides who computes a micro-batch and never what
is in it, and a run that resumes with another layout sees the same data. A single rank reading in order is the case d =
1.

Example: consumed 8, global batch 8, micro-batches of 2, two ranks
    k       0      1       2       3
    samples 8 9    10 11   12 13   14 15
    rank    0      1       0       1
"""

from __future__ import annotations

from typing import NamedTuple

from megalite.errors import ConfigError

__all__ = [
    "MicroBatchSamples",
    "global_micro_batch",
    "micro_batch_samples",
    "num_local_micro_batches",
    "step_micro_batches",
]


class MicroBatchSamples(NamedTuple):
    """Global micro-batch number `index` of a step and the dataset's `samples` in it."""

    index: int
    samples: range


def num_local_micro_batches(global_batch_size: int, micro_batch_size: int, dp_size: int) -> int:
    """Micro-batches per rank and step. Raises ConfigError when the ranks cannot share the global batch evenly."""
    if min(global_batch_size, micro_batch_size, dp_size) < 1 or global_batch_size % (micro_batch_size * dp_size):
        raise ConfigError(
            f"a global batch of {global_batch_size} cannot be cut into micro-batches of {micro_batch_size} on "
            f"{dp_size} data-parallel ranks: it must be a positive multiple of {micro_batch_size} x {dp_size} = "
            f"{micro_batch_size * dp_size}"
        )
    return global_batch_size // (micro_batch_size * dp_size)


def global_micro_batch(local_index: int, dp_rank: int, dp_size: int) -> int:
    """The global number k of a rank's local micro-batch."""
    return local_index * dp_size + dp_rank


def micro_batch_samples(consumed_samples: int, index: int, micro_batch_size: int) -> range:
    """The samples of global micro-batch `index` of the step that starts at `consumed_samples`."""
    start = consumed_samples + index * micro_batch_size
    return range(start, start + micro_batch_size)


def step_micro_batches(
    consumed_samples: int, *, global_batch_size: int, micro_batch_size: int, dp_rank: int, dp_size: int
) -> list[MicroBatchSamples]:
    """What rank `dp_rank` reads in one step, in order. Raises ConfigError for sizes or a rank that do not fit."""
    num_local = num_local_micro_batches(global_batch_size, micro_batch_size, dp_size)
    if not 0 <= dp_rank < dp_size or consumed_samples < 0:
        raise ConfigError(f"there is no data-parallel rank {dp_rank} of {dp_size} after {consumed_samples} samples")
    indices = [global_micro_batch(j, dp_rank, dp_size) for j in range(num_local)]
    return [MicroBatchSamples(k, micro_batch_samples(consumed_samples, k, micro_batch_size)) for k in indices]
