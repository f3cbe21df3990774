"""Cross entropy and greedy choice on logits that are cut over tp along the vocabulary.

Collectives of one call, each of [S, B] numbers (a test counts them):

|                                | forward                                                  | backward |
|--------------------------------|----------------------------------------------------------|----------|
| `vocab_parallel_cross_entropy` | all-reduce (max), all-reduce (target logit and sum of exp) | -        |
| `vocab_parallel_argmax`        | all-reduce (max), all-reduce (lowest index that has it)  | -        |

Decisions
- Columns that pad the vocabulary take no part: not in the softmax, with gradient 0, never chosen.
- The caller says how many columns all ranks have together, so that gathered logits, whose loss would be wrong by
  log(tp), are refused.
- The softmax is computed in fp32 (fp64 for fp64 logits) in one buffer [S, B, V_local], which backward turns into the
  gradient in place.
- These are for logits that exist. A stage's loss is `chunked_loss`, which never holds them and knows label smoothing and
  z-loss.

Legend: S sequence, B micro-batch, V padded vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite import comm
from megalite.grid import Axis
from megalite.tensor_parallel.layers import check_tokens

__all__ = ["vocab_parallel_argmax", "vocab_parallel_cross_entropy"]


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, *, vocab_size: int, padded_vocab_size: int, tp: Axis) -> Tensor:
    """Token losses -log softmax(logits)[target] over the first `vocab_size` columns.

    logits: this rank's [S, B, V_local]; targets: int64 [S, B], alike on all ranks. Returns [S, B] fp32 (fp64 for fp64
    logits). Raises DataError for a target outside the vocabulary; on other devices than the CPU its loss and gradient
    are NaN instead, as looking would wait.
    """
    _check_width(logits, vocab_size, padded_vocab_size, tp)
    check_tokens(targets, vocab_size)
    return _CrossEntropy.apply(logits, targets, vocab_size, tp)  # type: ignore[return-value]


@torch.no_grad()
def vocab_parallel_argmax(logits: Tensor, *, vocab_size: int, padded_vocab_size: int, tp: Axis) -> Tensor:
    """The token with the greatest logit, the lowest one among equals: this rank's [S, B, V_local] -> int64 [S, B] on
    all ranks."""
    _check_width(logits, vocab_size, padded_vocab_size, tp)
    start, num_valid = valid_columns(logits.shape[-1], vocab_size, tp)
    nobody = torch.full(logits.shape[:-1], vocab_size, dtype=torch.int64, device=logits.device)
    best = _local_max(logits, num_valid)
    index = nobody if num_valid == 0 else logits[..., :num_valid].argmax(-1) + start
    winner = comm.all_reduce(best, tp, "max")
    return comm.all_reduce(torch.where(best == winner, index, nobody), tp, "min")


def _check_width(logits: Tensor, vocab_size: int, padded_vocab_size: int, tp: Axis) -> None:
    width = logits.shape[-1]
    assert width * tp.size == padded_vocab_size >= vocab_size, (
        f"logits of width {width} on {tp.size} tp ranks are not the shares of {padded_vocab_size} columns "
        f"({vocab_size} of them valid); were they gathered?"
    )


def valid_columns(width: int, vocab_size: int, tp: Axis) -> tuple[int, int]:
    """Global index of this rank's first of `width` columns, and how many of its columns are not padding."""
    start = tp.rank * width
    return start, min(max(vocab_size - start, 0), width)


def _local_max(logits: Tensor, num_valid: int) -> Tensor:
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if num_valid == 0:
        return torch.full(logits.shape[:-1], float("-inf"), dtype=dtype, device=logits.device)
    return logits[..., :num_valid].amax(-1).to(dtype)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, vocab_size: int, tp: Axis) -> Tensor:
        start, num_valid = valid_columns(logits.shape[-1], vocab_size, tp)
        width = logits.shape[-1]
        maximum = comm.all_reduce_(_local_max(logits, num_valid), tp, "max")
        buffer = logits - maximum.unsqueeze(-1)  # a new tensor of the maximum's type

        column = targets - start
        is_own = (column >= 0) & (column < width)
        column = column.clamp(0, width - 1).unsqueeze(-1)
        target_logit = buffer.gather(-1, column).squeeze(-1).masked_fill_(~is_own, 0.0)
        buffer.exp_()[..., num_valid:].zero_()
        target_logit, total = comm.all_reduce_(torch.stack((target_logit, buffer.sum(-1))), tp)
        # NaN before anything is derived from it, so that the gradient shows it too: a finite gradient would be applied
        total = total.masked_fill((targets < 0) | (targets >= vocab_size), float("nan"))

        ctx.dtype = logits.dtype
        ctx.save_for_backward(buffer, total, column, is_own)
        return total.log().sub_(target_logit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        buffer, total, column, is_own = ctx.saved_tensors
        dloss = grads[0]
        # softmax = exp / total; changing the saved buffer makes autograd refuse a second backward through it
        gradient = buffer.mul_((dloss / total).unsqueeze(-1))
        gradient.scatter_add_(-1, column, (-dloss * is_own).unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None
