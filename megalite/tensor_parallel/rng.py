"""Dropout whose random numbers are a function of what is dropped, not of what ran before.

Decisions
- Before every use the device's default generator is seeded from a hash of (seed, first sample of the micro-batch,
  layer, site) and, where the activation is split over tp, the tp rank. Nothing has to be saved, restored or kept in
  step: recomputation, another schedule, another number of pipeline stages and a resumed run draw the same masks.
- Where the activation is whole on every tp rank, the masks agree; where it is split, they differ. Data-parallel ranks
  hold other samples, so theirs differ as well.
- With probability 0 no generator is touched.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.grid import Axis

__all__ = ["DropoutKey", "dropout", "seed_dropout"]


@dataclass(frozen=True)
class DropoutKey:
    """What the random numbers of one layer in one micro-batch depend on; layer -1 is the embedding."""

    seed: int
    first_sample: int
    layer: int


def seed_dropout(key: DropoutKey, site: str, device: torch.device, shard: int | None) -> None:
    """Seed the default generator of `device` for one use at `site`; `shard` is the tp rank where the activation is
    split."""
    text = f"{key.seed}:{key.first_sample}:{key.layer}:{site}:{shard}"
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(number)
    else:
        assert device.type == "cpu", f"no keyed random numbers on {device.type}"
        torch.default_generator.manual_seed(number)


def dropout(x: Tensor, p: float, key: DropoutKey, site: str, *, training: bool, split_over: Axis | None) -> Tensor:
    """Zero elements of `x` with probability `p` and scale the others by 1 / (1 - p); `x` itself unless training with p
    > 0.

    `split_over` is the tp axis where `x` is split over tp (masks differ between its ranks), None where x is whole (they
    agree).
    """
    if not training or p == 0.0:
        return x
    shard = split_over.rank if split_over is not None and split_over.size > 1 else None
    seed_dropout(key, site, x.device, shard)
    return F.dropout(x, p, training=True)
