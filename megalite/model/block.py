"""One decoder block: x + drop(attention(norm(x))), then x + drop(mlp(norm(x))).

Decisions:
- Pre-norm; the residual stream stays in the type of the computation.
- What all blocks of one micro-batch share (rotation, where dropout's random numbers come from) travels in a `Pass`.
  The rotation in it stays fp32: `data_parallel/` does not let its wrapper cast a block's arguments.
- Under sequence parallelism, norms, dropout and residual see this tp rank's share of the sequence (their masks differ
  over tp); otherwise every tp rank computes the same there (their masks agree).
- What is kept for the backward pass is the business of `recompute`; the block says where its parts begin and end.

Legend: S sequence, B micro-batch, H hidden.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.grid import Axis
from megalite.model.attention import Attention
from megalite.model.mlp import build_mlp
from megalite.model.norms import build_norm
from megalite.model.recompute import BlockMemory, branch, offloading, recompute
from megalite.model.rope import Rotation
from megalite.tensor_parallel.parameter import ParallelContext, to_local
from megalite.tensor_parallel.rng import DropoutKey, dropout

__all__ = ["Block", "Pass", "residual_split"]


@dataclass(frozen=True)
class Pass:
    """What the layers of a stage share during the forward pass of one micro-batch.

    rotation: None without rotary positions. mask: of `attention_mask`, None for causal attention. seed, first_sample: the
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
    """Decoder block with global number `layer`. memory: what it keeps for its backward pass; everything if not given."""

    def __init__(self, config: ModelConfig, layer: int, ctx: ParallelContext, memory: BlockMemory | None = None) -> None:
        super().__init__()
        self.layer, self.dropout_p, self.split_over = layer, config.hidden_dropout, residual_split(ctx)
        self.memory = memory = memory or BlockMemory()
        self.attention_norm = build_norm(config, ctx)
        self.attention = Attention(config, ctx, recompute_core="core_attn" in memory.modules)
        self.mlp_norm = build_norm(config, ctx)
        self.mlp = build_mlp(config, ctx, recompute_activation="mlp_act" in memory.modules)

    def forward(self, x: Tensor, shared: Pass) -> Tensor:
        """[S, B, H] -> [S, B, H] (under sequence parallelism both are this rank's share of S)."""
        with self._offloading(x, shared):
            return recompute(lambda x: self._run(x, shared), x) if self.memory.whole_block else self._run(x, shared)

    def _run(self, x: Tensor, shared: Pass) -> Tensor:
        key = shared.dropout_key(self.layer)
        attended = branch(self.memory, "attention", self.attention_norm, self.attention, x, shared.rotation, key, shared.mask)
        x = x + self._drop(attended, key, "attention_output")
        return x + self._drop(branch(self.memory, "mlp", self.mlp_norm, self.mlp, x, key), key, "mlp_output")

    def _drop(self, x: Tensor, key: DropoutKey, site: str) -> Tensor:
        return dropout(x, self.dropout_p, key, site, training=self.training, split_over=self.split_over)

    def _offloading(self, x: Tensor, shared: Pass) -> AbstractContextManager[Any]:
        if not (self.memory.offload and x.is_cuda):
            return nullcontext()
        common = [*(shared.rotation or ()), *([] if shared.mask is None else [shared.mask])]
        return offloading([*(to_local(parameter) for parameter in self.parameters()), *common])
