"""One decoder block: x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

Decisions:
- Pre-norm; the residual stream stays in the type of the computation.
- What all blocks of one micro-batch share (rotation, where dropout's random numbers come from) travels in a `Pass`.
  The rotation in it stays fp32: `data_parallel/` does not let its wrapper cast a block's arguments.
- Under sequence parallelism, norms, dropout and residual see this tp rank's share of the sequence (their masks differ
  over tp); otherwise every tp rank computes the same there (their masks agree).

Legend: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.grid import Axis
from megalite.model.attention import Attention
from megalite.model.mlp import build_mlp
from megalite.model.norms import build_norm
from megalite.model.rope import Rotation
from megalite.tensor_parallel.parameter import ParallelContext
from megalite.tensor_parallel.rng import DropoutKey, dropout

__all__ = ["Block", "Pass", "residual_split"]


@dataclass(frozen=True)
class Pass:
    """What the layers of a stage share during the forward pass of one micro-batch.

    rotation: None without rotary positions. mask: of `document_mask`, None for causal attention. seed, first_sample: the
    layout-independent part of every dropout key.
    """

    rotation: Rotation | None
    seed: int
    first_sample: int
    mask: Tensor | None = None

    def dropout_key(self, layer: int) -> DropoutKey:
        """The key of a global layer number; -1 is the embedding."""
        return DropoutKey(seed=self.seed, first_sample=self.first_sample, layer=layer)


def residual_split(ctx: ParallelContext) -> Axis | None:
    """The axis that the residual stream is split over: tp under sequence parallelism, else none."""
    return ctx.tp if ctx.sequence_parallel else None


class Block(nn.Module):
    """Decoder block with global number `layer`."""

    def __init__(self, config: ModelConfig, layer: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.layer, self.dropout_p, self.split_over = layer, config.hidden_dropout, residual_split(ctx)
        self.attention_norm = build_norm(config, ctx)
        self.attention = Attention(config, ctx)
        self.mlp_norm = build_norm(config, ctx)
        self.mlp = build_mlp(config, ctx)

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """[S, B, H] -> [S, B, H] (under sequence parallelism both are this rank's share of S)."""
        key = shared.dropout_key(self.layer)
        x = x + self._drop(self.attention(self.attention_norm(x), shared.rotation, key, shared.mask), key, "attention_output")
        return x + self._drop(self.mlp(self.mlp_norm(x)), key, "mlp_output")

    def _drop(self, x: Tensor, key: DropoutKey, site: str) -> Tensor:
        return dropout(x, self.dropout_p, key, site, training=self.training, split_over=self.split_over)
