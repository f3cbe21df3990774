"""A hash of every logical tensor's content that does not depend on how the tensor is cut over ranks.

Decisions
- hash(X) = sum over r, c of bits(X[r, c]) * A[r] * B[c] modulo 2^64, for X as a matrix of its first dimension by all others. Every rank
  adds up its own part with the global r and c, and sums of parts may be taken in any order. A and B are odd numbers from SplitMix64
  (Steele, Lea, Flood 2014), so a change of one element always changes the hash, and a change of several is missed with a chance of at
  most about 2^-32 (signs that flip reach the upper 33 bits only). Elements of 8 bytes count as two of 4, for the same reason.
- It finds accidents, not attacks: whoever wants two tensors of equal hash can construct them.
- Bits are compared, not numbers: 0.0 and -0.0 differ, equal NaNs do not. Shape and dtype stand beside the hash.
- A part that several ranks hold counts once. Where such copies differ, nobody can tell which one the checkpoint library will write: the
  tensor gets no hash, and a warning.

Shapes: R first dimension, C product of the others; of a part: r, c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megalite import comm
from megalite.grid import Axis
from megalite.log import get_logger

__all__ = ["content_hashes", "hash_of", "with_hashes"]

_PIECE = 1 << 16  # elements at a time: their products stay in a core's cache
_ROWS, _COLUMNS = 0x0D1B54A32D192ED1, 0x5851F42D4C957F2D  # where the two sequences of weights begin
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

Part = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part."""
Known = dict[tuple, Tensor]
"""Weights made already: a model has few different shapes, and small tensors cost less than their weights."""


def hash_of(tensor: Tensor) -> str:
    """Of a whole tensor on this rank: 16 hexadecimal digits."""
    return _digits(int(_sum_of_part(tensor.detach(), tensor.shape, (0,) * tensor.dim(), {})))


def with_hashes(tables: Mapping[str, Mapping], hashes: Mapping[str, str]) -> dict[str, dict]:
    """The manifest's `tensors` with a "hash" for every tensor that has one."""
    return {name: {**facts, "hash": hashes[name]} if name in hashes else dict(facts) for name, facts in tables.items()}


def content_hashes(tensors: Mapping[str, Tensor], world: Axis) -> dict[str, str]:
    """{logical name: hash} of all tensors that the ranks of `world` hold. Collective.

    tensors: this rank's parts, as `save_checkpoint` takes them.
    """
    names, parts, sums = [], [], []
    known: Known = {}
    for name, tensor in tensors.items():
        part, local = _part_of(tensor)
        if local.numel() > 0:
            names.append(name)
            parts.append(part)
            sums.append(_sum_of_part(local, tensor.shape, part[0], known))
    return _joined(comm.all_gather_object(list(zip(names, parts, _on_host(sums), strict=True)), world), tensors)


def _joined(ranks: Sequence[Sequence[tuple[str, Part, int]]], tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hashes from the sums of all ranks' parts."""
    sums: dict[str, dict[Part, int]] = {name: {} for name, tensor in tensors.items() if tensor.numel() == 0}
    unequal: set[str] = set()
    for name, part, value in (entry for rank in ranks for entry in rank):
        if sums.setdefault(name, {}).setdefault(part, value) != value:
            unequal.add(name)
    if unequal:
        shown = ", ".join(sorted(unequal)[:5])
        get_logger().warning(
            f"{len(unequal)} tensors differ between ranks that should hold copies, and get no hash: {shown}; see --check-replicas-interval"
        )
    return {name: _digits(sum(parts.values())) for name, parts in sums.items() if name not in unequal}


def _part_of(tensor: Tensor) -> tuple[Part, Tensor]:
    """Where this rank's part lies in the logical tensor, and the part."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return ((0,) * tensor.dim(), tuple(tensor.shape)), tensor
    (chunk,) = tensor.__create_chunk_list__()  # what the checkpoint library asks, so both know the same cut
    return (tuple(chunk.offsets), tuple(chunk.sizes)), tensor.to_local()


@torch.no_grad()
def _sum_of_part(local: Tensor, shape: Sequence[int], offsets: Sequence[int], known: Known) -> Tensor:
    """The terms of one part, an int64 scalar on the part's device. shape: of the whole tensor; integers wrap around."""
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if local.numel() == 0:
        return total
    if local.dim() == 0:
        local, shape, offsets = local.reshape(1), (1,), (0,)
    bits = local.contiguous().unsqueeze(-1).view(_BITS[local.element_size()])  # [..., 1], or [..., 2] of 8-byte elements
    row_weights = _weights(_ROWS, bits.shape[:1], shape[:1], offsets[:1], local.device, known)
    inner = (*shape[1:], bits.shape[-1]), (*offsets[1:], 0)
    column_weights = _weights(_COLUMNS, bits.shape[1:], *inner, local.device, known)
    bits = bits.reshape(len(row_weights), len(column_weights))
    width = min(bits.shape[1], _PIECE)
    height = _PIECE // width
    for top in range(0, bits.shape[0], height):
        for left in range(0, bits.shape[1], width):
            piece = bits[top : top + height, left : left + width]
            total += (_row_sums(piece, column_weights[left : left + width]) * row_weights[top : top + height]).sum()
    return total


def _row_sums(piece: Tensor, weights: Tensor) -> Tensor:
    if piece.device.type == "cpu":
        # NumPy converts while it multiplies, which makes it half as fast again; CUDA has no product of integer matrices at all.
        return torch.from_numpy(np.einsum("rc,c->r", piece.numpy(), weights.numpy()))
    return (piece * weights).sum(1)


def _weights(start: int, sizes: Sequence[int], shape: Sequence[int], offsets: Sequence[int], device: torch.device, known: Known) -> Tensor:
    """The weights of a part's rows or columns: odd elements of SplitMix64's sequence from `start`, int64."""
    key = (start, tuple(sizes), tuple(shape[1:]), tuple(offsets), device)
    if key not in known:
        x = (_numbers(sizes, shape, offsets, device) + 1) * _signed(0x9E3779B97F4A7C15) + start
        x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
        x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
        known[key] = (x ^ _shifted(x, 31)) | 1
    return known[key]


def _numbers(sizes: Sequence[int], shape: Sequence[int], offsets: Sequence[int], device: torch.device) -> Tensor:
    """Place of each element of a part in the flat whole of `shape`, int64."""
    numbers = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
        steps = (torch.arange(size, device=device) + offset) * prod(shape[dim + 1 :])
        numbers = (numbers[:, None] + steps).flatten()
    return numbers


def _shifted(x: Tensor, by: int) -> Tensor:
    """`x` shifted right with zeros coming in: int64 has a sign that `>>` would copy."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _on_host(sums: Sequence[Tensor]) -> list[int]:
    """The values of scalars, with one wait for each device."""
    values = dict.fromkeys(range(len(sums)), 0)
    for device in {value.device for value in sums}:
        places = [place for place, value in enumerate(sums) if value.device == device]
        values |= zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True)
    return [values[place] for place in range(len(sums))]


def _digits(total: int) -> str:
    return f"{total % (1 << 64):016x}"
