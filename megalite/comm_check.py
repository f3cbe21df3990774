"""A check at start-up that sums over ranks are sums.

Backends have had collectives that averaged where they should sum, or the reverse, for some operations only (torch's gloo did until
2025: gradients were then too large by the number of ranks, without any error). A run would train on, so it is looked at once, with
numbers whose sum, mean and order all differ.

Both of torch's reductions that a run relies on are checked over every axis: all-reduce and reduce-scatter, ours and FSDP2's alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite import comm
from megalite.errors import CommError
from megalite.grid import Axis

__all__ = ["check_sums"]


def check_sums(axes: Sequence[Axis], device: torch.device) -> None:
    """Collective over each of `axes`. Raises CommError that names axis, operation and numbers."""
    found = [problem for axis in axes if axis.size > 1 for problem in _problems(axis, device)]
    if found:
        raise CommError(f"this backend does not sum: {'; '.join(found)}. Gradients would be wrong: use another version of torch or backend")


def _problems(axis: Axis, device: torch.device) -> list[str]:
    mine = torch.arange(1.0, axis.size + 1, device=device) * (axis.rank + 1)
    factor = axis.size * (axis.size + 1) // 2  # 1 + 2 + ... over the ranks
    whole = [float(factor * place) for place in range(1, axis.size + 1)]
    wanted = {"all-reduce": whole, "reduce-scatter": [whole[axis.rank]], "all-gather": [float(rank + 1) for rank in range(axis.size)]}
    found = {
        "all-reduce": comm.all_reduce(mine, axis).tolist(),
        "reduce-scatter": comm.reduce_scatter(mine, axis).tolist(),
        "all-gather": comm.all_gather(mine[:1], axis).tolist(),
    }
    return [
        f"{name} over axis {axis.name} of {axis.size} ranks gave {found[name]} instead of {values}"
        for name, values in wanted.items()
        if found[name] != values
    ]
