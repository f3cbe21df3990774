"""Which sequences train, validate and test, and how many samples each split must hold.

A split string such as `969,30,1` gives shares; the sequences are cut in file order. The bounds are floating-point
running sums, rounded half to even: odd-looking, but this is where Megatron cuts, and another rounding would move
documents from training into validation. Unlike there, a string that is not plainly up to three numbers is refused
instead of guessed.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import numpy as np

from megalite.errors import DataError

__all__ = ["SPLIT_NAMES", "SamplesPerSplit", "SplitName", "num_samples_per_split", "parse_split", "split_ranges"]

SplitName = Literal["train", "valid", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "valid", "test")

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SEPARATOR = r"(?:\s*[,/]\s*|\s+)"
_SPLIT = re.compile(rf"\s*{_NUMBER}(?:{_SEPARATOR}{_NUMBER}){{0,2}}\s*", re.ASCII)


class SamplesPerSplit(NamedTuple):
    """Samples wanted per split."""

    train: int
    valid: int
    test: int


def parse_split(split: str) -> tuple[float, float, float]:
    """Shares of train, valid and test, summing to 1; missing ones are 0.

    Raises DataError unless `split` is one to three non-negative numbers, not all zero, between commas, slashes or
    spaces.
    """
    if not _SPLIT.fullmatch(split):
        raise DataError(
            f"split {split!r} is not one to three non-negative numbers separated by commas, slashes or spaces; write for example 969,30,1"
        )
    numbers = [float(number) for number in re.findall(_NUMBER, split)]
    total = float(np.sum(numbers))  # plain left-to-right; the built-in sum is compensated from Python 3.12 on
    if total == 0:
        raise DataError(f"split {split!r} gives nothing to train, valid and test: at least one number must be positive")
    train, valid, test = [number / total for number in numbers] + [0.0] * (3 - len(numbers))
    return train, valid, test


def split_ranges(split: str, num_sequences: int) -> dict[SplitName, tuple[int, int] | None]:
    """Half-open ranges of sequence numbers per split; None for a share of zero.

    A small share of few sequences can round to an empty range, which is not None: the caller asked for that split.
    Raises DataError like `parse_split`.
    """
    ranges: dict[SplitName, tuple[int, int] | None] = {}
    low = 0.0
    for name, share in zip(SPLIT_NAMES, parse_split(split), strict=True):
        high = low + share
        ranges[name] = (round(low * num_sequences), round(high * num_sequences)) if high > low else None
        low = high
    return ranges


def num_samples_per_split(
    *, train_steps: int, global_batch_size: int, eval_interval: int, eval_steps: int, train_samples: int | None = None
) -> SamplesPerSplit:
    """Samples a run draws: training, all its evaluations one after the other, and one final test.

    `train_samples` replaces `train_steps * global_batch_size` where a run counts samples. Validation counts one
    evaluation per `eval_interval` steps and one at the end, of `eval_steps` global batches each.
    Raises DataError for a count that is negative, or zero where one must divide.
    """
    counts = {"train_steps": train_steps, "eval_steps": eval_steps, "train_samples": train_samples or 0}
    bad = [f"{name} is {count}" for name, count in counts.items() if count < 0]
    divisors = {"global_batch_size": global_batch_size, "eval_interval": eval_interval}
    bad += [f"{name} is {count}, it must be at least 1" for name, count in divisors.items() if count < 1]
    if bad:
        raise DataError("cannot count the samples of a run: " + "; ".join(bad))
    num_evaluations = train_steps // eval_interval + 1
    return SamplesPerSplit(
        train=train_steps * global_batch_size if train_samples is None else train_samples,
        valid=num_evaluations * eval_steps * global_batch_size,
        test=eval_steps * global_batch_size,
    )
