"""Gives the ranks of adapters to the layers that need them: during training the least important directions of all layers are dropped
until a budget is left (after AdaLoRA, arXiv:2303.10512).

Direction i of an adapter is the pair of row i of A [r, in] and column i of B [out, r]. Its importance at a step is the mean of |w dL/dw|
over the row plus that over the column; s is its moving average, u that of its distance from s, and s * u decides.

Decisions
- A dropped direction is one whose column of B is set to zero, at every update after it was dropped. So the layers know nothing of it,
  an adapter's scale stays, and a checkpoint or an export is that of plain adapters. Until the last allocation it may come back.
- AdaLoRA averages single elements and has a factor per direction; here whole directions are averaged, which needs r numbers per layer.
- The budget falls with the cube of the time that is left, from all directions to `lora_average_rank` times the number of adapters.
- All ranks decide alike: importances are summed over tp and dp_shard, and gathered over pp only when directions are chosen. The sums depend
  on the layout in their last bits, so two layouts may choose differently where two directions are equally important.
- A skipped update changes nothing here.

Legend: r rank; `_local` is this rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite import comm
from megalite.config_lora import LoraConfig
from megalite.grid import Grid
from megalite.optim.parameters import OptimParameter

__all__ = ["RankAllocator", "budget_at", "chosen_directions"]

_MEMORY = 0.85
"""Of both moving averages, as in AdaLoRA."""


@dataclass(frozen=True, eq=False)
class _Directions:
    """The directions of one layer. sensitivity, uncertainty, kept: [r]; kept is 1.0 or 0.0."""

    layer: str
    a: OptimParameter
    b: OptimParameter
    sensitivity: Tensor
    uncertainty: Tensor
    kept: Tensor


class RankAllocator:
    """For the adapters among `parameters`. end: the update after which nothing is dropped any more."""

    def __init__(self, parameters: Sequence[OptimParameter], lora: LoraConfig, grid: Grid, end: int) -> None:
        assert lora.lora_average_rank is not None
        self._grid, self._average = grid, lora.lora_average_rank
        self._start, self._end, self._interval = lora.lora_allocation_start, end, lora.lora_allocation_interval
        by_name = {parameter.name: parameter for parameter in parameters}
        self._layers = []
        for name, a in by_name.items():
            if name.endswith(".adapter.a"):
                layer, rank = name.removesuffix(".adapter.a"), a.parameter.shape[0]
                zero, one = torch.zeros(rank, device=grid.device), torch.ones(rank, device=grid.device)
                self._layers.append(_Directions(layer, a, by_name[f"{layer}.adapter.b"], zero, zero.clone(), one))

    def named_state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; the tensors share storage, equal on all ranks that hold the layer."""
        return {
            f"{directions.layer}.adapter.{key}": getattr(directions, key)
            for directions in self._layers
            for key in ("sensitivity", "uncertainty", "kept")
        }

    @torch.no_grad()
    def observe(self, skip: Tensor) -> None:
        """Take in the final gradients of a step before its update. Collective over tp and dp_shard. skip: 1.0 where there is no update."""
        if not self._layers:
            return
        now = torch.cat([self._importance(directions) for directions in self._layers])
        for axis in (self._grid.tp, self._grid.dp_shard):
            now = comm.all_reduce(now, axis)
        for directions, new in zip(self._layers, now.split([len(one.kept) for one in self._layers]), strict=True):
            sensitivity = _MEMORY * directions.sensitivity + (1 - _MEMORY) * new
            uncertainty = _MEMORY * directions.uncertainty + (1 - _MEMORY) * (new - sensitivity).abs()
            for old, value in ((directions.sensitivity, sensitivity), (directions.uncertainty, uncertainty)):
                old.copy_(torch.where(skip > 0.5, old, value))

    @torch.no_grad()
    def drop(self, num_updates: int) -> str | None:
        """After update `num_updates`: choose anew where it is time to, clear what is dropped. Collective over pp. Returns what to log."""
        said = None
        if self._start < num_updates <= self._end and (num_updates == self._end or (num_updates - self._start) % self._interval == 0):
            said = self._choose(num_updates)
        if num_updates > self._start:
            for directions in self._layers:
                directions.b.local.mul_(directions.kept)
        return said

    def _importance(self, directions: _Directions) -> Tensor:
        """[r], this rank's part: of parameters that every tp rank holds whole, only the first one counts."""
        parts = torch.zeros_like(directions.kept)
        for parameter, dim in ((directions.a, 0), (directions.b, 1)):
            grad = parameter.local_grad
            if grad is None or not (parameter.tp_sharded or self._grid.tp.is_first):
                continue
            sums = (parameter.local * grad).abs().sum(1 - dim) / parameter.parameter.shape[1 - dim]
            first = 0 if len(sums) == len(parts) else self._grid.dp_shard.rank * -(-len(parts) // self._grid.dp_shard.size)
            parts[first : first + len(sums)] += sums
        return parts

    def _choose(self, num_updates: int) -> str:
        mine = {one.layer: (one.sensitivity * one.uncertainty).tolist() for one in self._layers}
        scores: dict[str, list[float]] = {}
        for part in comm.all_gather_object(mine, self._grid.pp):
            scores.update(part)
        total = sum(map(len, scores.values()))
        budget = budget_at(num_updates, self._start, self._end, total, round(self._average * len(scores)))
        kept = chosen_directions(scores, budget)
        for directions in self._layers:
            directions.kept.copy_(torch.tensor(kept[directions.layer]))
        counts = ", ".join(f"{layer.removeprefix('layers.')} {sum(flags):.0f}" for layer, flags in sorted(kept.items()))
        return f"adapters keep {budget} of {total} directions after update {num_updates}: {counts}"


def budget_at(update: int, start: int, end: int, total: int, target: int) -> int:
    """Directions that are left after an update: all of `total` up to `start`, `target` from `end` on, between them by a cubic."""
    left = 1.0 - min(max((update - start) / (end - start), 0.0), 1.0)
    return target + round((total - target) * left**3)


def chosen_directions(scores: Mapping[str, Sequence[float]], budget: int) -> dict[str, list[float]]:
    """1.0 for the `budget` most important directions of all layers, 0.0 for the others. Equal ones: by the layer's name, then by number."""
    order = sorted((-score, layer, number) for layer, values in scores.items() for number, score in enumerate(values))
    best = {(layer, number) for _, layer, number in order[:budget]}
    return {layer: [1.0 if (layer, number) in best else 0.0 for number in range(len(values))] for layer, values in scores.items()}
