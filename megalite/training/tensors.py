"""All tensors of a run by name: what a checkpoint holds, and what a rewind copies.

Keys: `model.NAME`, `optimizer.NAME.exp_avg`, `optimizer.NAME.exp_avg_sq` with logical parameter names. The last stage's copy of a tied
embedding goes by the embedding's name, and is left out where the embedding is on the same rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megalite.optim import without_local_copies

if TYPE_CHECKING:
    from megalite.training.setup import Run

__all__ = ["run_tensors"]


def run_tensors(run: Run) -> dict[str, Tensor]:
    """All tensors of a checkpoint as this rank holds them, under their keys; they share storage with the run."""
    tensors: dict[str, Tensor] = {}
    for parameter in without_local_copies(run.parameters):
        tensors[f"model.{parameter.name}"] = parameter.parameter.detach()
    for name, moments in run.optimizer.named_state().items():
        tensors |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
    if run.ranks is not None:
        tensors |= {f"optimizer.{name}": value for name, value in run.ranks.named_state().items()}
    return tensors
