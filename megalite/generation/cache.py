"""Keys and values of the tokens that were read, in memory that is allocated once.

Decisions
- Layout [layers][B, K, slots, D]: what one head reads lies together. Rows have lengths of their own, so nothing is padded.
- A token's slot is its position. With a sliding window the slots are a ring as long as the window: position p lies in slot
  p modulo window, over the token that nobody may look at any more. Memory then does not grow with the text.
- Several tokens at once attend to what was there before and to each other; only then they are stored, because in a ring they
  would overwrite what the first of them still needs.
- int8: a key or value is stored as integers from -127 to 127 and one fp32 scale for its D numbers, a quarter of fp32's memory.
  A new token's own key and value are rounded in the same way before they are used, so chunks change nothing.

Legend: B rows, T new tokens, L tokens that are looked at, K key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Cache", "CacheShape", "View"]

_LARGEST = 127


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """Sizes of a cache. heads: this rank's key/value heads."""

    num_layers: int
    rows: int
    heads: int
    capacity: int
    head_dim: int
    window: int | None = None

    @property
    def is_ring(self) -> bool:
        return self.window is not None and self.window < self.capacity

    @property
    def slots(self) -> int:
        return self.window if self.window is not None and self.is_ring else self.capacity


class Cache:
    """keys, values: of every layer [B, K, slots, D], in `dtype` or int8; scales: [B, K, slots] of each, with int8 only.

    lengths: tokens of every row, on the host.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device, *, int8: bool = False) -> None:
        self.shape, self.dtype, self.is_int8 = shape, dtype, int8
        size = (shape.rows, shape.heads, shape.slots, shape.head_dim)
        # zeros: what is masked out is multiplied by 0, which not every value survives
        kept = torch.int8 if int8 else dtype
        self.keys, self.values = ([torch.zeros(size, dtype=kept, device=device) for _ in range(shape.num_layers)] for _ in range(2))
        num_scales = shape.num_layers if int8 else 0
        self.key_scales, self.value_scales = ([torch.zeros(size[:3], device=device) for _ in range(num_scales)] for _ in range(2))
        self.lengths = [0] * shape.rows

    @property
    def num_bytes(self) -> int:
        """Memory of all layers."""
        return sum(part.nbytes for part in (*self.keys, *self.values, *self.key_scales, *self.value_scales))

    def grow(self, rows: slice, num_new: int) -> None:
        """Count tokens that all layers have stored."""
        self.lengths[rows] = [length + num_new for length in self.lengths[rows]]


class View:
    """What the tokens of one call look at. rows: of the cache; positions: [B, T] of the new tokens, in order.

    mask: bool [B, 1, T, L] where a token may look at a key; None: at all of them, or causally where `is_first`.
    """

    def __init__(self, cache: Cache, rows: slice, positions: Tensor) -> None:
        self.cache, self.rows, self.positions = cache, rows, positions
        lengths, shape = cache.lengths[rows], cache.shape
        self.num_new = positions.shape[1]
        self.start, self.is_even = lengths[0], len(set(lengths)) == 1
        self.used = min(max(lengths), shape.slots)
        self.end = max(lengths) + self.num_new
        self.is_joined = self.num_new > 1 and shape.is_ring and self.used > 0  # old and new, see the module's decisions
        sees_all = shape.window is None or shape.window >= self.end
        self.is_first = self.is_even and self.start == 0 and self.num_new > 1 and sees_all
        is_full_ring = shape.is_ring and min(lengths) + 1 >= shape.slots
        needs_none = self.num_new == 1 and (is_full_ring or (self.is_even and sees_all))
        self.mask = None if self.is_first or needs_none else self._mask()
        self._row_numbers = torch.arange(len(lengths), device=positions.device)[:, None]
        self._slots = positions % shape.slots if shape.is_ring else positions

    def _mask(self) -> Tensor:
        keys, queries = self._key_positions()[:, None, None, :], self.positions[:, None, :, None]
        allowed = (keys <= queries) & (keys >= 0)
        window = self.cache.shape.window
        return allowed if window is None else allowed & (keys > queries - window)

    def _key_positions(self) -> Tensor:
        """[B or 1, L], in the order of what `store` returns; below 0 where there is none."""
        shape, device = self.cache.shape, self.positions.device
        if not shape.is_ring or (self.num_new > 1 and not self.is_joined):
            return torch.arange(self.end, device=device)[None]
        lengths = torch.tensor(self.cache.lengths[self.rows], device=device)[:, None]
        if self.is_joined:
            return torch.cat((_in_ring(lengths, self.used, shape.slots), self.positions), dim=1)
        return _in_ring(lengths + 1, min(self.end, shape.slots), shape.slots)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: [B, T, K, D] of the new tokens. Returns all that they look at, [B, K, L, D]."""
        cache, found = self.cache, []
        scales = (cache.key_scales[layer], cache.value_scales[layer]) if cache.is_int8 else (None, None)
        for memory, scale, new in ((cache.keys[layer], scales[0], k), (cache.values[layer], scales[1], v)):
            memory, scale = memory[self.rows], None if scale is None else scale[self.rows]
            new_BKTD = new.transpose(1, 2)
            if scale is None:
                found.append(self._exchange(memory, new_BKTD))
            else:
                integers, new_scale = _to_int8(new_BKTD)
                seen = self._exchange(memory, integers), self._exchange(scale.unsqueeze(-1), new_scale)
                found.append((seen[0] * seen[1]).to(cache.dtype))
        return found[0], found[1]

    def _exchange(self, memory: Tensor, new: Tensor) -> Tensor:
        """Store [B, K, T, ...] and return what is looked at, in the same form."""
        if self.is_joined:
            seen = torch.cat((memory[:, :, : self.used], new), dim=2)
            self._put(memory, new)
            return seen
        self._put(memory, new)
        return new if self.num_new > 1 and self.start == 0 and self.is_even else memory[:, :, : min(self.end, memory.shape[2])]

    def _put(self, memory: Tensor, new: Tensor) -> None:
        kept = min(self.num_new, memory.shape[2])  # of more tokens than a ring is long, the newest
        slots, new = self._slots[:, self.num_new - kept :], new[:, :, self.num_new - kept :]
        if self.is_even and not self.cache.shape.is_ring:
            memory[:, :, self.start : self.end] = new
        else:
            memory.transpose(1, 2)[self._row_numbers, slots] = new.transpose(1, 2)


def _in_ring(lengths: Tensor, num_slots: int, size: int) -> Tensor:
    """Positions in the first slots of a ring after [B, 1] tokens; below 0 where nothing was written."""
    newest = lengths - 1
    return newest - (newest - torch.arange(num_slots, device=lengths.device)) % size


def _to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., D] -> integers of the same shape and scales [..., 1], fp32: the largest of the D numbers becomes 127."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) / _LARGEST
    return (wide / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8), scale
