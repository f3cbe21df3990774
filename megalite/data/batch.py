"""One micro-batch as every part of megalite sees it.

Legend: B sequences of the micro-batch, S tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, device

__all__ = ["MicroBatch"]


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Inputs and targets of one forward pass.

    tokens, labels: int64 [B, S]; loss_mask: float32 [B, S], 0 where a position bears no loss; position_ids: int64 [B, S].
    document_ids: int32 [B, S], tokens attend only within their document, or None: they attend to everything before them.
    reference: float32 [B], the reference model's log-probabilities of answers, of which rows 2i are preferred to rows 2i + 1, or None.
    first_sample: number of this micro-batch's first sample in the order of the whole run. It does not depend on the layout, so random
    numbers keyed by it (dropout) do not either.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    first_sample: int
    document_ids: Tensor | None = None
    reference: Tensor | None = None

    @property
    def num_losses(self) -> Tensor:
        """What a sum of losses is divided by: the number of loss-bearing tokens, or of pairs; an fp32 scalar."""
        return self.loss_mask.sum() if self.reference is None else self.reference.new_tensor(len(self.reference) / 2)

    def to(self, target: device) -> MicroBatch:
        """The same micro-batch on another device."""
        return MicroBatch(
            tokens=self.tokens.to(target, non_blocking=True),
            labels=self.labels.to(target, non_blocking=True),
            loss_mask=self.loss_mask.to(target, non_blocking=True),
            position_ids=self.position_ids.to(target, non_blocking=True),
            first_sample=self.first_sample,
            document_ids=None if self.document_ids is None else self.document_ids.to(target, non_blocking=True),
            reference=None if self.reference is None else self.reference.to(target, non_blocking=True),
        )
