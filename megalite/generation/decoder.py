"""A model prepared for inference: one step computes the newest tokens only, from a cache of keys and values.

Decisions
- A batch of prompts of different lengths is read row by row, without padding, and only the steps after that run together. So a
  row's numbers do not depend on what else is in the batch, but for the rounding of products of other sizes.
- The rotations of all positions are computed once.
- Under tp every rank computes its heads and its part of the vocabulary; the logits are joined. Under pp hidden states go from stage
  to stage, and only the last one has logits. Sequence parallelism is off: one token cannot be split.
- On CPUs steps run in C++ where that was built (`native`); it reads the same weights and the same cache.

Legend: B rows, T new tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite import comm
from megalite.generation.cache import Cache, CacheShape, View
from megalite.generation.layers import Layer, apply_norm
from megalite.generation.native import NativeSteps
from megalite.grid import Axis
from megalite.model import GPTStage
from megalite.model.block import Block
from megalite.tensor_parallel.parameter import to_local

__all__ = ["Decoder"]


class Decoder:
    """stage: in evaluation mode, built without sequence parallelism. pp: the axis whose rank holds that stage of the model; None: the
    stage is the whole model. All ranks of pp and tp must make the same calls. native: use C++ where it can be used.
    """

    def __init__(self, stage: GPTStage, pp: Axis | None = None, *, native: bool = True) -> None:
        self.pp = pp or Axis.single("pp")
        assert not stage.ctx.sequence_parallel, "generation needs a stage without sequence parallelism"
        assert (stage.embedding is not None, stage.head is not None) == (self.pp.is_first, self.pp.is_last), "another stage belongs here"
        self.config, self._stage, self._tp = stage.config, stage, stage.ctx.tp
        self._layers = [Layer(block) for block in stage.layers.values() if isinstance(block, Block)]
        parameter = next(stage.parameters())
        self.device, self._dtype = parameter.device, parameter.dtype
        self._head = None if stage.head is None else self._head_weight()
        self._rotations: tuple[Tensor, Tensor] | None = None
        self.native: NativeSteps | None = None
        if native and self._head is not None and NativeSteps.fits(stage):
            self.native = NativeSteps(stage, self._layers, self._head)

    @property
    def longest(self) -> int | None:
        """Tokens up to which a cache is right; None: without end."""
        scaling_ends = self.config.rope_scaling == "dynamic"  # beyond the original length all keys turn otherwise with every token
        original = self.config.rope_scaling_original_length
        return original if scaling_ends and original is not None else self.config.max_position_embeddings

    def new_cache(self, rows: int, capacity: int, *, int8: bool = False) -> Cache:
        """For texts of up to `capacity` tokens, prompt included."""
        heads = self._layers[0].groups if self._layers else 0
        shape = CacheShape(
            num_layers=len(self._layers),
            rows=rows,
            heads=heads,
            capacity=capacity,
            head_dim=self.config.head_dim,
            window=self.config.sliding_window,
        )
        if self._rotations is None or self._rotations[0].shape[0] < capacity:
            self._rotations = self._make_rotations(capacity, 1)
        return Cache(shape, self._dtype, self.device, int8=int8)

    def prefill(self, cache: Cache, row: int, ids: Sequence[int], chunk: int = 512) -> Tensor | None:
        """Read a prompt into an empty row, `chunk` tokens at a time.

        Returns the logits [V] of what follows, fp32; None on stages without the head.
        """
        assert cache.lengths[row] == 0 and ids, "a prompt is read once"
        logits = None
        for first in range(0, len(ids), chunk):
            tokens = torch.tensor([ids[first : first + chunk]], device=self.device)
            positions = torch.arange(first, first + tokens.shape[1], device=self.device)[None]
            rows = slice(row, row + 1)
            logits = self._forward(View(cache, rows, positions), tokens, self._rotations)
            cache.grow(rows, tokens.shape[1])
        return None if logits is None else logits[0]

    def step(self, cache: Cache, tokens: Sequence[int]) -> Tensor | None:
        """One more token in every row. Returns logits [B, V], fp32; None on stages without the head."""
        rows = slice(0, len(tokens))
        if self.native is not None:
            logits = self.native.step(cache, tokens, self._rotations)
            cache.grow(rows, 1)
            return logits
        positions = torch.tensor(cache.lengths, device=self.device)[:, None]
        logits = self._forward(View(cache, rows, positions), torch.tensor(tokens, device=self.device)[:, None], self._rotations)
        cache.grow(rows, 1)
        return logits

    def read_anew(self, ids: Sequence[int]) -> Tensor | None:
        """The logits [V] of what follows `ids`, as positions 0, 1, ... and with frequencies that belong to their number."""
        cache = self.new_cache(1, len(ids))
        positions = torch.arange(len(ids), device=self.device)[None]
        rotations = self._make_rotations(len(ids), len(ids))
        logits = self._forward(View(cache, slice(0, 1), positions), torch.tensor([ids], device=self.device), rotations)
        return None if logits is None else logits[0]

    @torch.no_grad()
    def _make_rotations(self, capacity: int, length: int) -> tuple[Tensor, Tensor] | None:
        """cos, cos and -sin, sin of every position beside each other, [capacity, R].

        Not in inference mode: the model keeps frequencies, and could not be trained with them any more.
        """
        if self._stage.rotary is None:
            return None
        cos, sin = (part[:, 0, 0] for part in self._stage.rotary(torch.arange(capacity, device=self.device)[None], length=length))
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def _head_weight(self) -> Tensor:
        stage = self._stage
        assert stage.head is not None
        if stage.head.output is not None:
            weight = stage.head.output.local_weight()
        else:
            assert stage.embedding is not None
            weight = to_local(stage.embedding.word.weight)
        return weight.detach() if self._tp.size > 1 else weight.detach()[: self.config.known_vocab_size]

    @torch.inference_mode()
    def _forward(self, view: View, tokens: Tensor, rotations: tuple[Tensor, Tensor] | None) -> Tensor | None:
        """tokens: [B, T] of the view. Returns logits of each row's last token, fp32 [B, V]."""
        x = self._enter(tokens, view.positions)
        rotation = None
        if rotations is not None:
            cos, sin = (table[view.positions].unsqueeze(2) for table in rotations)
            rotation = cos, sin
        for number, layer in enumerate(self._layers):
            x = layer.forward(x, number, rotation, view)
        if self._head is None:
            comm.start_send(x.contiguous(), self.pp, self.pp.rank + 1).wait()
            return None
        assert self._stage.head is not None
        logits = F.linear(apply_norm(self._stage.head.norm, x[:, -1]), self._head).float()
        return comm.all_gather(logits, self._tp, dim=-1)[:, : self.config.known_vocab_size]

    def _enter(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, T, H] before this stage's first layer."""
        embedding = self._stage.embedding
        if embedding is None:
            shape = (*tokens.shape, self.config.hidden_size)
            buffer = torch.empty(shape, dtype=self._dtype, device=self.device)
            return comm.start_recv(buffer, self.pp, self.pp.rank - 1).wait()
        x = embedding.word(tokens)
        return x if embedding.position is None else x + F.embedding(positions, to_local(embedding.position.weight))
