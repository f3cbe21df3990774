"""What every dataset hands out, so that loaders and blends need not know where tokens come from.

S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Sample", "SampleDataset"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sequence; the arrays belong to whoever asked for it and may be changed.

    `tokens` int64 [S] the inputs; `labels` int64 [S] the id to predict there; `loss_mask` float32 [S] 1 where
    that prediction counts, else 0; `position_ids` int64 [S].
    """

    tokens: np.ndarray
    labels: np.ndarray
    loss_mask: np.ndarray
    position_ids: np.ndarray


class SampleDataset(Protocol):
    """A fixed list of samples: sample `i` never depends on which samples were read before."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int, /) -> Sample: ...
