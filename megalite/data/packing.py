"""First-fit packing: pieces of different lengths into bins of one size, in the order in which they come.

Every piece goes into the earliest bin that has room, else into a new one. A tree over the bins, whose nodes know the largest room below
them, finds that bin in logarithmic time (Johnson 1973).

>>> first_fit([4, 3, 3, 1, 2], 6)
[[0, 3], [1, 2], [4]]
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["first_fit"]


def first_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """The numbers of the pieces in every bin. `lengths`: each from 1 to `size`."""
    width = 1
    while width < len(lengths):
        width *= 2
    room = [size] * (2 * width)  # node i has the children 2i and 2i + 1; bin b is the leaf width + b
    bins: list[list[int]] = []
    for piece, length in enumerate(lengths):
        assert 1 <= length <= size, f"piece {piece} of length {length} does not fit a bin of {size}"
        node = 1
        while node < width:
            node *= 2
            if room[node] < length:
                node += 1
        if node - width == len(bins):
            bins.append([])
        bins[node - width].append(piece)
        room[node] -= length
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins
