"""Token embedding, learned positions and their dropout.

Decisions:
- The result has the type of the weights, so a wrapper that casts weights decides the type of the whole residual stream.
- The table of learned positions is replicated over tp. Under sequence parallelism each rank looks up its share of the
  positions, so the table's gradient is partial over tp.

Legend: S sequence, B micro-batch, H hidden, P positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.data.batch import MicroBatch
from megalite.errors import ConfigError
from megalite.model.block import Pass, residual_split
from megalite.tensor_parallel.deferral import deferrable_embedding
from megalite.tensor_parallel.layers import VocabParallelEmbedding
from megalite.tensor_parallel.parameter import ParallelContext, ParameterInfo, add_parameter, to_local
from megalite.tensor_parallel.rng import dropout

__all__ = ["Embedding", "PositionEmbedding"]

EMBEDDING_LAYER = -1


class PositionEmbedding(nn.Module):
    """A learned vector per position, weight [P, H]. Raises ConfigError when P is not known."""

    weight: torch.Tensor

    def __init__(self, config: ModelConfig, ctx: ParallelContext) -> None:
        super().__init__()
        if config.max_position_embeddings is None:
            raise ConfigError("learned positions need max_position_embeddings: set it to the longest sequence")
        self.split_over, self.weight_grads = residual_split(ctx), ctx.weight_grads
        info = ParameterInfo(role="position", init="normal", std=config.init_method_std, partial_over_tp=ctx.sequence_parallel)
        shape = (config.max_position_embeddings, config.hidden_size)
        add_parameter(self, "weight", shape, tp=ctx.tp, shard_dim=None, info=info, device=ctx.device)

    def forward(self, positions: Tensor) -> Tensor:
        """integers [B, S] -> [S, B, H] (under sequence parallelism this rank's share of S)."""
        positions_SB = positions.t()
        if self.split_over is not None:
            positions_SB = positions_SB.chunk(self.split_over.size)[self.split_over.rank]
        return deferrable_embedding(positions_SB, to_local(self.weight), self.weight_grads)


class Embedding(nn.Module):
    """Everything before the first block."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, *, shared_over_pp: bool = False) -> None:
        super().__init__()
        self.dropout_p, self.split_over = config.hidden_dropout, residual_split(ctx)
        self.word = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            std=config.init_method_std,
            valid_rows=config.known_vocab_size,
            shared_over_pp=shared_over_pp,
            ctx=ctx,
        )
        learned = config.position_embedding_type == "learned_absolute"
        self.position = PositionEmbedding(config, ctx) if learned else None

    def forward(self, batch: MicroBatch, shared: Pass) -> Tensor:
        """-> [S, B, H] (under sequence parallelism this rank's share of S)."""
        x = self.word(batch.tokens.t())
        if self.position is not None:
            x = x + self.position(batch.position_ids)
        key = shared.dropout_key(EMBEDDING_LAYER)
        return dropout(x, self.dropout_p, key, "embedding", training=self.training, split_over=self.split_over)
