"""Muon: momentum whose direction is made orthogonal, for the matrices of the blocks, in every layout.

Decisions
- Orthogonal is the whole logical matrix, never a slice of it: it is joined from its parts on one of the dp_shard x tp ranks, which
  computes the iterations for all (`whole_matrix`). So the result does not depend on the layout but for the gradient's rounding, and has
  the same bits over pp and, where the gradient has, over sharding strategies. An m x n matrix (m <= n) costs about 30 m^2 n operations
  per step, whatever the number of tokens; ranks of dp_replicate repeat them, as do tp ranks for weights that all of them hold whole.
- Query, key, value, gate and up projections are parameters of their own here, hence matrices of their own (Megatron makes one matrix of
  fused ones unless told otherwise).
- Matrices of one size are dealt out together, so that ranks have equal work.
- The exchanges carry the momentum as fp32, whatever it is kept in.
- match_adam scales the update to AdamW's usual root mean square of 0.2 (Liu et al., arXiv 2502.16982), so that AdamW, which updates all
  other parameters, shares the learning rate. spectral keeps the spectral norm in step with the matrix' shape (Jordan et al., 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from torch import Tensor

from megalite.config import OptimConfig
from megalite.grid import Axis
from megalite.optim.groups import DTYPES, Entry, Rule, write_unless
from megalite.optim.parameters import OptimParameter
from megalite.optim.whole_matrix import MatrixPart, on_whole_matrices

__all__ = ["Muon", "is_muon_matrix", "newton_schulz", "update_scale"]

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the odd polynomial that drives singular values into about 0.7 to 1.2, steepest at 0 (Jordan et al., 2024)."""
SMALLEST_NORM = 1e-7


def is_muon_matrix(parameter: OptimParameter) -> bool:
    """Weights of the blocks' linear layers; tables, the head, norms, biases and positions are not."""
    return parameter.info.role == "linear" and parameter.parameter.ndim == 2


class Muon(Rule):
    """Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). Moment: momentum_buffer.

    The momentum is a running mean, (1 - mu) g + mu m, which differs from a running sum by a factor that the orthogonal direction does not
    see. Weight decay is decoupled. Two all-to-alls over dp_shard and two over tp for each round of matrices. Collective over both.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimConfig, tp: Axis, dp_shard: Axis) -> None:
        super().__init__(sorted(entries, key=lambda entry: (entry.parameter.parameter.numel(), entry.parameter.name)))
        self._config, self._tp, self._dp_shard = config, tp, dp_shard

    @torch.no_grad()
    def step(self, lr: float, skip: Tensor | None) -> None:
        cut, uncut = [], []
        for entry in self.entries:
            (uncut if entry.parameter.tp_shard_dim is None else cut).append(entry)
        for entries, tp in ((cut, self._tp), (uncut, Axis.single("tp"))):
            length = tp.size * self._dp_shard.size
            for first in range(0, len(entries), length):
                self._round(entries[first : first + length], tp, lr, skip)

    def _round(self, entries: list[Entry], tp: Axis, lr: float, skip: Tensor | None) -> None:
        config = self._config
        momenta = [self._momentum(entry) for entry in entries]
        mu = config.muon_momentum if config.muon_use_nesterov else 1.0
        parts = [
            MatrixPart(local=torch.lerp(entry.grad, momentum, mu), rows=_rows(entry, tp), tp_dim=entry.parameter.tp_shard_dim)
            for entry, momentum in zip(entries, momenta, strict=True)
        ]
        updates = on_whole_matrices(parts, self._orthogonalise, tp, self._dp_shard)
        for entry, momentum, update in zip(entries, momenta, updates, strict=True):
            rate = lr * entry.lr_factor
            size = rate * update_scale(entry.parameter.parameter.shape, config.muon_scale_mode)
            shrunk = entry.local * (1 - rate * entry.weight_decay)
            write_unless(skip, entry.local, shrunk.sub_(update, alpha=size))
            write_unless(skip, entry.state["momentum_buffer"], momentum)

    def _momentum(self, entry: Entry) -> Tensor:
        before = entry.state["momentum_buffer"].to(device=entry.local.device, dtype=torch.float32, non_blocking=True)
        return torch.lerp(before, entry.grad, 1 - self._config.muon_momentum)

    def _orthogonalise(self, matrix: Tensor) -> Tensor:
        return newton_schulz(matrix, self._config.muon_num_ns_steps, DTYPES[self._config.muon_dtype])


def _rows(entry: Entry, tp: Axis) -> int:
    rows = entry.parameter.parameter.shape[0]
    return rows // tp.size if entry.parameter.tp_shard_dim == 0 else rows


def newton_schulz(matrix: Tensor, num_steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[m, n] -> [m, n] fp32 with the same singular vectors and singular values of about 1, computed in `dtype`.

    Zero stays zero. The quintic iteration and its coefficients are Jordan's (2024).
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if is_tall else matrix).to(dtype)
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if is_tall else x).float()


def update_scale(shape: Sequence[int], mode: str) -> float:
    """Factor of the orthogonal update of an m x n matrix: 0.2 sqrt(max(m, n)), or sqrt(max(1, m / n))."""
    rows, columns = shape
    if mode == "match_adam":
        return 0.2 * sqrt(max(rows, columns))
    assert mode == "spectral", f"unknown scale {mode}"
    return sqrt(max(1.0, rows / columns))
