"""Final norm, output projection and loss.

Decisions:
- The vocabulary is split over tp; logits stay split, the loss and arg-max functions know that.
- Losses are made without holding logits (`tensor_parallel.chunked_loss`), in training and evaluation; logits are for
  generation. Both run through `forward`, so that this module is one unit for data parallelism.
- The value of the loss is always the plain cross entropy: with label smoothing or z-loss too, training and evaluation
  show comparable numbers. Its gradient in training is that of what is minimised.
- A tied head is one of two things. Beside the embedding it has no weight and is handed the embedding's. On another
  stage it holds a copy, known under the embedding's name, whose gradient is summed with the embedding's.

Legend: S sequence, B micro-batch, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.norms import build_norm
from megalite.model.preference import preference_loss
from megalite.tensor_parallel.chunked_loss import HeadLoss, LossSettings
from megalite.tensor_parallel.layers import ColumnParallelLinear, column_parallel
from megalite.tensor_parallel.parameter import ParallelContext, to_local

__all__ = ["TIED_NAME", "Head"]

TIED_NAME = "embedding.word.weight"


class Head(nn.Module):
    """Everything after the last block.

    beside_embedding: the stage holds the embedding too, so that a tied head needs no copy of it.
    """

    def __init__(self, config: ModelConfig, ctx: ParallelContext, *, beside_embedding: bool, loss: LossSettings) -> None:
        super().__init__()
        self.ctx = ctx
        vocab = dict(vocab_size=config.known_vocab_size, padded_vocab_size=config.padded_vocab_size)
        self._training_loss = HeadLoss(ctx=ctx, settings=loss, **vocab)
        self._plain_loss = replace(self._training_loss, settings=replace(loss, label_smoothing=0.0, z_loss=0.0))
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

    def forward(self, x: Tensor, tied_weight: Tensor | None = None, labels: tuple[Tensor, ...] | None = None) -> Tensor:
        """x: [S, B, H] (under sequence parallelism this rank's share of S); labels: targets int64 and loss mask fp32
        [S, B], and with a loss of preferences the reference's log-probabilities [B].

        Returns the sum of cross entropy * mask (or of the pairs' losses), an fp32 scalar that is equal on all tp ranks; without labels this
        rank's logits [S, B, V_local].
        """
        x = self.norm(x)
        beta = self._training_loss.settings.preference_beta
        if labels is not None and beta is None:
            return self._loss(x, self._local_weight(tied_weight), *labels)
        logits = self._logits(x, tied_weight)
        if labels is None:
            return logits
        assert beta is not None
        loss = self._training_loss
        sizes = dict(vocab_size=loss.vocab_size, padded_vocab_size=loss.padded_vocab_size)
        return preference_loss(logits, *labels, beta=beta, tp=self.ctx.tp, **sizes)

    @property
    def is_of_preferences(self) -> bool:
        """Whether the loss is one of pairs of answers."""
        return self._training_loss.settings.preference_beta is not None

    def _logits(self, x: Tensor, tied_weight: Tensor | None) -> Tensor:
        if self.output is not None:
            return self.output(x)
        ctx, weight = self.ctx, self._local_weight(tied_weight)
        return column_parallel(x, [weight], [None], ctx.tp, ctx.sequence_parallel, ctx.weight_grads)[0]

    def _loss(self, x: Tensor, weight: Tensor, targets: Tensor, loss_mask: Tensor) -> Tensor:
        loss = self._training_loss if self.training else self._plain_loss
        minimised, cross_entropy = loss(x, weight, targets, loss_mask)
        # the value of the one, the gradient of the other: the bracket is 0
        return cross_entropy + (minimised - minimised.detach()) if loss.settings.has_terms else minimised

    def _local_weight(self, tied_weight: Tensor | None) -> Tensor:
        if self.output is not None:
            return self.output.local_weight()
        assert tied_weight is not None, "a tied head beside the embedding is handed its weight"
        return to_local(tied_weight)
