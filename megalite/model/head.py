"""Final norm and output projection.

Decisions:
- The vocabulary is split over tp; logits stay split, the loss and arg-max functions know that.
- The head only makes logits: the loss is the stage's business, so that this module is one unit for data parallelism.
- A tied head is one of two things. Beside the embedding it has no weight and is handed the embedding's. On another
  stage it holds a copy, known under the embedding's name, whose gradient is summed with the embedding's.

Legend: S sequence, B micro-batch, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.norms import build_norm
from megalite.tensor_parallel.layers import ColumnParallelLinear, column_parallel
from megalite.tensor_parallel.parameter import ParallelContext, to_local

__all__ = ["TIED_NAME", "Head"]

TIED_NAME = "embedding.word.weight"


class Head(nn.Module):
    """Everything after the last block, up to logits.

    beside_embedding: the stage holds the embedding too, so that a tied head needs no copy of it.
    """

    def __init__(self, config: ModelConfig, ctx: ParallelContext, *, beside_embedding: bool) -> None:
        super().__init__()
        self.ctx = ctx
        self.norm = build_norm(config, ctx)
        tied = not config.untie_embeddings_and_output_weights
        self.output = None
        if not (tied and beside_embedding):
            self.output = ColumnParallelLinear(
                config.hidden_size,
                config.padded_vocab_size,
                bias=False,
                std=config.init_method_std,
                role="head",
                valid_rows=config.known_vocab_size,
                copy_of=TIED_NAME if tied else None,
                shared_over_pp=tied,
                ctx=ctx,
            )

    def forward(self, x: Tensor, tied_weight: Tensor | None = None) -> Tensor:
        """[S, B, H] (under sequence parallelism this rank's share of S) -> this rank's logits [S, B, V_local]."""
        x = self.norm(x)
        if self.output is not None:
            return self.output(x)
        assert tied_weight is not None, "a tied head beside the embedding is handed its weight"
        ctx = self.ctx
        return column_parallel(x, [to_local(tied_weight)], [None], ctx.tp, ctx.sequence_parallel, ctx.weight_grads)[0]
