"""The part of a GPT or Llama style model that one pipeline stage holds.

Decisions:
- A stage is a slice of the layers, perhaps with the embedding or the head. It sends nothing and knows no schedule: it
  is a function of (hidden states or None, micro-batch).
- Layers are known by their global number, in parameter names, initial values and dropout alike, so slicing changes no
  number.
- The head's stage returns the sum of token losses. It never divides: the runtime does, by the number of loss-bearing
  tokens of the whole batch, whatever the layout.
- Everything runs through `forward`, logits too, because data parallelism gathers parameters in hooks around it.

Legend: S sequence, B micro-batch, H hidden, V padded vocabulary; `_local` is this tp rank's share.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.config_numerics import MemoryConfig
from megalite.data.batch import MicroBatch
from megalite.model.attention import attention_mask
from megalite.model.block import Block, Pass
from megalite.model.embedding import Embedding
from megalite.model.head import Head
from megalite.model.materialize import materialize
from megalite.model.recompute import block_memory
from megalite.model.rope import Rotary
from megalite.model.rope_scaling import RopeScaling
from megalite.pipeline.partition import StageSpec
from megalite.tensor_parallel.chunked_loss import LossSettings
from megalite.tensor_parallel.parameter import ParallelContext

__all__ = ["GPTStage", "build_stage"]


class GPTStage(nn.Module):
    """Layers `spec.layers` of the model, with embedding and head where `spec` has them.

    num_stages: stages of the whole model. seed: for dropout; initial values are the business of `materialize`. loss:
    how the head's stage computes it, and what is added to it in training. memory: what blocks keep for their backward.
    Raises ConfigError when the model does not fit the tp size.
    """

    def __init__(
        self,
        config: ModelConfig,
        spec: StageSpec,
        ctx: ParallelContext,
        *,
        num_stages: int,
        seed: int,
        loss: LossSettings | None = None,
        memory: MemoryConfig | None = None,
    ) -> None:
        super().__init__()
        assert (spec.has_embedding and spec.has_head) == (num_stages == 1), "only a lone stage has both ends"
        self.config, self.spec, self.ctx, self.seed = config, spec, ctx, seed
        self.tied = not config.untie_embeddings_and_output_weights
        self.rotary = Rotary(config.rotary_dim, config.rotary_base, RopeScaling.of(config)) if config.rotary_dim else None
        shared = self.tied and num_stages > 1
        self.embedding = Embedding(config, ctx, shared_over_pp=shared) if spec.has_embedding else None
        memories = [block_memory(memory or MemoryConfig(), position) for position in range(len(spec.layers))]
        self.layers = nn.ModuleDict(
            {str(layer): Block(config, layer, ctx, memory) for layer, memory in zip(spec.layers, memories, strict=True)}
        )
        self.head = None
        if spec.has_head:
            self.head = Head(config, ctx, beside_embedding=spec.has_embedding, loss=loss or LossSettings())

    def forward(self, x: Tensor | None, batch: MicroBatch, *, return_logits: bool = False) -> Tensor:
        """x: hidden states [S_local, B, H] of the stage before (S_local = S without sequence parallelism), None on
        the first stage.

        Returns hidden states of the same shape; on the head's stage the sum of cross entropy * loss_mask over all
        positions, an fp32 scalar that is equal on all tp ranks, or with `return_logits` this rank's logits
        [S, B, V_local].
        """
        rotation = self.rotary(batch.position_ids) if self.rotary is not None else None
        mask = attention_mask(batch.position_ids.shape[1], batch.document_ids, self.config.sliding_window, batch.position_ids.device)
        shared = Pass(rotation, self.seed, batch.first_sample, mask)
        assert (x is None) == (self.embedding is not None), "hidden states come in exactly where no embedding is"
        hidden = x if self.embedding is None else self.embedding(batch, shared)
        assert hidden is not None
        for block in self.layers.values():
            hidden = block(hidden, shared)
        if self.head is None:
            assert not return_logits, "this stage has no head"
            return hidden
        labels = None if return_logits else (batch.labels.t().contiguous(), batch.loss_mask.t())
        if labels is not None and batch.reference is not None:
            labels = (*labels, batch.reference)
        return self.head(hidden, self._tied_weight(), labels)

    def logits(self, x: Tensor | None, batch: MicroBatch) -> Tensor:
        """This rank's logits [S, B, V_local], in the type of the computation; for the head's stage."""
        return self(x, batch, return_logits=True)

    def units(self) -> list[tuple[str, nn.Module]]:
        """The modules that data parallelism shards as one unit each, by dotted name, in order of use.

        The same for every pipeline split, so that reductions are bitwise equal over pp. One exception: beside its
        embedding a tied head has no weight, so neither end is a unit and both are left to the stage itself: the
        weight must stay gathered from its first use, before all blocks, to its last, after them.
        """
        blocks: list[tuple[str, nn.Module]] = [(f"layers.{name}", block) for name, block in self.layers.items()]
        if self.tied and self.embedding is not None and self.head is not None:
            return blocks
        first: list[tuple[str, nn.Module]] = [("embedding", self.embedding)] if self.embedding is not None else []
        last: list[tuple[str, nn.Module]] = [("head", self.head)] if self.head is not None else []
        return first + blocks + last

    def _tied_weight(self) -> Tensor | None:
        return self.embedding.word.weight if self.tied and self.embedding is not None else None


def build_stage(
    config: ModelConfig,
    spec: StageSpec,
    ctx: ParallelContext,
    *,
    num_stages: int,
    seed: int,
    device: torch.device | str,
) -> GPTStage:
    """A stage with its initial values on `device`, for uses without data parallelism."""
    stage = GPTStage(config, spec, replace(ctx, device="meta"), num_stages=num_stages, seed=seed)
    materialize(stage, "", device, seed)
    return stage
