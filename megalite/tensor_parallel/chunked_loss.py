"""Output projection and cross entropy in one pass over pieces of the micro-batch, so that its logits never exist at once.

Of each piece of at most `chunk_tokens` tokens the logits are computed, then the losses, then at once the gradients of
hidden states and weight: the sum of losses is a scalar, so backward only has to multiply them by its gradient. No matrix
product is made twice and nothing of the size of the vocabulary waits for backward but dW. (The idea is that of Liger
Kernel's fused linear cross entropy, Hsu et al. 2024, arXiv:2410.10989.)

Collectives of one call over tp, for n pieces (a test counts them):

|                    | forward                                                                        | backward |
|--------------------|--------------------------------------------------------------------------------|----------|
| always             | n all-gathers of 3 numbers per token (4 with label smoothing)                  | -        |
| with gradients     | all-reduce (dx)                                                                | -        |
| sequence parallel  | all-gather (x); with gradients reduce-scatter (dx) in place of the all-reduce  | -        |

Decisions
- Losses per token: log Z - logit[target], or with smoothing s over the V valid columns (1 - s) times that plus s / V
  times the sum of -log softmax (as `F.cross_entropy(label_smoothing=s)`); z-loss adds z (log Z)^2 (PaLM, Chowdhery et
  al. 2022, arXiv:2204.02311, section 5). Columns that pad the vocabulary take no part and get no gradient.
- Statistics and the differences softmax - target are fp32 (fp64 for fp64), then rounded to the type of the products.
  Buffers are reused by all pieces: on a CPU fresh large ones cost more time in page faults than in arithmetic.
- dW of all pieces is added in fp32 and rounded once, after the multiplication in backward. Between the two it needs
  4 V_local H bytes per micro-batch; with a queue (`deferral`) it is complete in I and waits until W in the weight's type.
- fp16 has too little range for probabilities (below 6e-8 they would be 0) and for sums over a whole piece (above 65504
  they would be infinite, which no loss scale can cure). So the differences are multiplied by 16 and, for dW, the hidden
  states by 1/64; the loss scale comes later, in fp32.
- Without gradients none of their work is done.

Legend: S sequence, B micro-batch, T tokens of a piece, H hidden, V padded vocabulary; `_local` is this tp rank's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite import comm
from megalite.tensor_parallel.cross_entropy import valid_columns
from megalite.tensor_parallel.deferral import add_later
from megalite.tensor_parallel.layers import check_tokens
from megalite.tensor_parallel.parameter import ParallelContext

__all__ = ["HeadLoss", "LossSettings"]

_CHUNK_BYTES_CPU, _CHUNK_BYTES = 16 * 2**20, 256 * 2**20
_DIFFERENCE_FACTOR = {torch.float16: 16.0}
_HIDDEN_FACTOR = {torch.float16: 1 / 64}


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """chunk_tokens: most tokens whose logits exist at one time; None: as many as make 16 MiB of fp32 logits on a CPU
    (what caches and allocators like best), 256 MiB elsewhere (large products, few launches), at least 128.

    label_smoothing and z_loss: see above. preference_beta: the loss is another one (`model/preference`).
    """

    chunk_tokens: int | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    preference_beta: float | None = None

    @property
    def has_terms(self) -> bool:
        """Whether what is minimised differs from the cross entropy."""
        return self.label_smoothing != 0 or self.z_loss != 0

    def most_tokens(self, width: int, device_type: str) -> int:
        """Of one piece, where `width` columns of the vocabulary are local. It does not depend on the micro-batch, pp or
        dp."""
        if self.chunk_tokens is not None:
            return self.chunk_tokens
        return max(128, (_CHUNK_BYTES_CPU if device_type == "cpu" else _CHUNK_BYTES) // (4 * width))


@dataclass(frozen=True, kw_only=True)
class HeadLoss:
    """The sum of masked token losses as a function of hidden states and head weight.

    vocab_size: columns that are no padding, of `padded_vocab_size` on all tp ranks together.
    """

    ctx: ParallelContext
    vocab_size: int
    padded_vocab_size: int
    settings: LossSettings

    def __call__(self, x: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor]:
        """x: [S, B, H], alike on all ranks, or [S_local, B, H] under sequence parallelism; weight: local [V_local, H];
        targets: int64 and loss_mask: fp32 [S, B], alike on all ranks.

        Returns two scalars, fp32 (fp64 for fp64 weights), alike on all ranks: the sum of what is minimised, which is the
        one with a gradient, and the sum of cross entropies. They are equal without smoothing and z-loss. Raises
        DataError for a target outside the vocabulary; on other devices than the CPU losses and gradients are NaN
        instead, as looking would wait.
        """
        width, tp = weight.shape[0], self.ctx.tp
        assert width * tp.size == self.padded_vocab_size >= self.vocab_size, (
            f"a weight of {width} rows on {tp.size} tp ranks is not a share of {self.padded_vocab_size} rows"
        )
        check_tokens(targets, self.vocab_size)
        if not torch.is_grad_enabled():
            return _gathered_pass(self, x, weight, targets, loss_mask, (False, False)).run()
        return _HeadLoss.apply(x, add_later(weight, self.ctx.weight_grads), targets, loss_mask, self)  # type: ignore[return-value]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor, loss: HeadLoss) -> tuple[Tensor, Tensor]:
        part = _gathered_pass(loss, x, weight, targets, loss_mask, ctx.needs_input_grad[:2])
        minimised, cross_entropy = part.run()
        ctx.mark_non_differentiable(cross_entropy)
        tp, dx = loss.ctx.tp, part.dx
        if dx is not None:
            dx = dx.view(*targets.shape, -1)
            dx = comm.reduce_scatter(dx, tp) if loss.ctx.sequence_parallel else comm.all_reduce_(dx, tp)
        ctx.dtype = x.dtype
        ctx.save_for_backward(dx, part.dw)
        return minimised, cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        scale = grads[0] / _DIFFERENCE_FACTOR.get(ctx.dtype, 1.0)
        dw_scale = scale / _HIDDEN_FACTOR.get(ctx.dtype, 1.0)
        return _times(dx, scale, ctx.dtype), _times(dw, dw_scale, ctx.dtype), None, None, None


def _times(x: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """x * scale with the scale in its own type: in a 16-bit one it would be rounded, or 0.

    In place where the type allows; changing what was saved makes autograd refuse a second backward through it.
    """
    if x is None:
        return None
    wide = x.mul_(scale) if x.dtype == scale.dtype else x.to(scale.dtype).mul_(scale)
    return wide.to(dtype)


def _gathered_pass(loss: HeadLoss, x: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor, needs: tuple[bool, bool]) -> _Pass:
    whole = comm.all_gather(x, loss.ctx.tp) if loss.ctx.sequence_parallel else x
    assert whole.shape[:-1] == targets.shape == loss_mask.shape, "one target and one mask per position"
    return _Pass(loss, whole.reshape(-1, whole.shape[-1]), weight, targets.reshape(-1), loss_mask.reshape(-1), needs)


class _Pass:
    """One pass over all tokens. After `run`, `dx` [S * B, H] and `dw` [V_local, H] are there where they were asked for,
    this rank's parts of the gradients times the two factors above."""

    def __init__(self, loss: HeadLoss, x: Tensor, weight: Tensor, targets: Tensor, mask: Tensor, needs: tuple[bool, bool]) -> None:
        self.settings, self.vocab_size, self.tp = loss.settings, loss.vocab_size, loss.ctx.tp
        self.dtype = torch.promote_types(x.dtype, torch.float32)
        self.x, self.weight, self.mask = x, weight, mask.to(self.dtype)
        self.grad_weight = self.mask * _DIFFERENCE_FACTOR.get(x.dtype, 1.0)
        (tokens, _), width, is_half = x.shape, weight.shape[0], x.dtype != self.dtype
        self.start, self.num_valid = valid_columns(width, loss.vocab_size, loss.ctx.tp)
        column = targets - self.start
        self.is_foreign, self.is_bad = (column < 0) | (column >= width), (targets < 0) | (targets >= loss.vocab_size)
        self.column = column.clamp_(0, width - 1).unsqueeze(-1)
        onehot_weight = self.grad_weight * (loss.settings.label_smoothing - 1)
        self.onehot_weight = onehot_weight.masked_fill_(self.is_foreign, 0.0).unsqueeze(-1)
        num_chunks = -(-tokens // loss.settings.most_tokens(width, x.device.type))
        self.length = -(-tokens // num_chunks)  # pieces of nearly the same length, so that none is small
        self.logits = x.new_empty(self.length, width)
        self.wide = x.new_empty(self.length, width, dtype=self.dtype) if is_half else self.logits
        self.losses = x.new_empty(tokens, dtype=self.dtype)
        self.minimised = torch.empty_like(self.losses) if loss.settings.has_terms else self.losses
        self.dx = torch.empty_like(x) if needs[0] else None
        self.dw = weight.new_empty(weight.shape, dtype=self.dtype) if needs[1] else None
        self.dw_part = torch.empty_like(weight) if needs[1] and is_half else None

    def run(self) -> tuple[Tensor, Tensor]:
        """The sums over tokens of what is minimised and of cross entropy, both times the mask."""
        for first in range(0, self.x.shape[0], self.length):
            rows = slice(first, first + self.length)
            factor = self._lose(rows)
            if self.dx is not None or self.dw is not None:
                self._differentiate(rows, factor)
        cross_entropy = (self.losses * self.mask).sum()
        if self.minimised is self.losses:
            return cross_entropy.clone(), cross_entropy
        return (self.minimised * self.mask).sum(), cross_entropy

    def _lose(self, rows: slice) -> Tensor:
        """Losses of a piece; leaves exp(logits - own maximum) in `wide`, and returns what makes that the softmax times its
        weight in the gradient, [T]."""
        x = self.x[rows]
        logits, wide = self.logits[: len(x)], self.wide[: len(x)]
        torch.mm(x, self.weight.t(), out=logits)
        if self.num_valid < logits.shape[1]:
            logits[:, self.num_valid :].fill_(float("-inf"))
        own_maximum = logits.amax(-1).to(self.dtype)
        if self.num_valid == 0:  # a finite maximum, so that exp gives 0 and not NaN
            own_maximum.fill_(torch.finfo(self.dtype).min)
        target_logit = logits.gather(-1, self.column[rows]).squeeze(-1).to(self.dtype).masked_fill_(self.is_foreign[rows], 0.0)
        torch.sub(logits, own_maximum.unsqueeze(-1), out=wide)
        statistics = [own_maximum, target_logit]
        if self.settings.label_smoothing:
            sums = wide[:, : self.num_valid].sum(-1) + self.num_valid * own_maximum
            statistics.append(sums / self.vocab_size)
        statistics.append(wide.exp_().sum(-1))
        maximum, log_total, target_logit, mean_logit = self._join(torch.stack(statistics), self.is_bad[rows])

        self.losses[rows] = log_total - (target_logit - maximum)
        factor = self.grad_weight[rows] * (own_maximum - maximum - log_total).exp()
        if self.settings.has_terms:
            log_z = log_total + maximum
            smoothing, z_loss = self.settings.label_smoothing, self.settings.z_loss
            target = target_logit if mean_logit is None else torch.lerp(target_logit, mean_logit, smoothing)
            self.minimised[rows] = log_total - (target - maximum) + z_loss * log_z.square()
            factor = factor * (1 + 2 * z_loss * log_z)
        return factor

    def _join(self, statistics: Tensor, is_bad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Over all ranks' columns: maximum, log of the sum of exp(logit - maximum), target logit, mean logit; [T] each."""
        every = comm.all_gather(statistics.unsqueeze(0), self.tp)
        maxima, totals = every[:, 0], every[:, -1]
        maximum = maxima.amax(0)
        total = ((maxima - maximum).exp_() * totals).sum(0)
        # NaN before anything is derived from it, so that the gradient shows it too: a finite gradient would be applied
        total.masked_fill_(is_bad, float("nan"))
        mean = every[:, 2].sum(0) if self.settings.label_smoothing else None
        return maximum, total.log_(), every[:, 1].sum(0), mean

    def _differentiate(self, rows: slice, factor: Tensor) -> None:
        """The piece's rows of dx, and its part of dW."""
        x, smoothing = self.x[rows], self.settings.label_smoothing
        logits, wide = self.logits[: len(x)], self.wide[: len(x)]
        wide.mul_(factor.unsqueeze(-1)).scatter_add_(-1, self.column[rows], self.onehot_weight[rows])
        if smoothing:
            wide[:, : self.num_valid].sub_(self.grad_weight[rows].unsqueeze(-1) * (smoothing / self.vocab_size))
        if wide.dtype != logits.dtype:
            logits.copy_(wide)
        if self.dx is not None:
            torch.mm(logits, self.weight, out=self.dx[rows])
        if self.dw is not None:
            self._add_weight_gradient(logits, x, beta=0 if rows.start == 0 else 1)

    def _add_weight_gradient(self, differences: Tensor, x: Tensor, beta: int) -> None:
        """dw = beta * dw + differences.T @ x; with beta 0 what was in dw does not count."""
        assert self.dw is not None
        if self.dw_part is None:
            torch.addmm(self.dw, differences.t(), x, beta=beta, out=self.dw)
            return
        factor = _HIDDEN_FACTOR.get(x.dtype)
        torch.mm(differences.t(), x if factor is None else x * factor, out=self.dw_part)
        self.dw.copy_(self.dw_part) if beta == 0 else self.dw.add_(self.dw_part)
