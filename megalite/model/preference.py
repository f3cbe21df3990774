"""The loss of direct preference optimisation (DPO, arXiv:2305.18290, equation 7) on the head's stage.

For a pair with the chosen answer w and the rejected one l: -log sigmoid(beta * ((log p(w) - ref(w)) - (log p(l) - ref(l)))), where p is the
model and ref what the reference model gave. It is log 2 as long as the model is the reference.

Decisions
- The samples of a pair are rows 2i and 2i + 1 of a micro-batch (`data/preferences`), so a pipeline, and the sum over data-parallel
  ranks, treat this loss like any other: a sum over the micro-batch, divided by the number of pairs of the global batch.
- Every answer's likelihood must be known before the gradient of any token is, so the logits of the micro-batch exist, cut over tp.

Legend: S sequence, B micro-batch, V padded vocabulary; `_local` is this tp rank's share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.grid import Axis
from megalite.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

__all__ = ["preference_loss"]


def preference_loss(
    logits: Tensor,
    targets: Tensor,
    loss_mask: Tensor,
    reference: Tensor,
    *,
    beta: float,
    vocab_size: int,
    padded_vocab_size: int,
    tp: Axis,
) -> Tensor:
    """The sum over the pairs, an fp32 scalar that is equal on all tp ranks.

    logits: this rank's [S, B, V_local]; targets int64 and loss_mask fp32 [S, B]; reference: fp32 [B], log-probabilities.
    """
    losses = vocab_parallel_cross_entropy(logits, targets, vocab_size=vocab_size, padded_vocab_size=padded_vocab_size, tp=tp)
    gained = -(losses * loss_mask).sum(0) - reference
    margins = beta * (gained[0::2] - gained[1::2])
    assert len(gained) % 2 == 0, "pairs do not lie across micro-batches"
    return -F.logsigmoid(margins.to(torch.promote_types(margins.dtype, torch.float32))).sum()
