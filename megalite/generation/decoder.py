"""A whole model prepared for inference: one step computes the newest tokens only, from a cache of keys and values.

Decisions
- The layers' weights are used through plain matrix products, with q, k, v and gate, up joined into one each. The model's parameters
  become views of the joined ones, so nothing is held twice.
- Keys and values lie in memory that is allocated once, [layers][B, K, capacity, D]. Rows have their own lengths: a batch of prompts of
  different lengths is read row by row, without padding, and only the steps after that run together. So a row's numbers do not depend on
  what else is in the batch, but for the rounding of products of other sizes.
- In a step of one token per row, the R query heads that share a key/value head stand where attention has its sequence: keys and values
  are not repeated.
- The rotations of all positions are computed once.

Legend: B rows, T new tokens, L tokens so far, H hidden, N query heads, K key/value heads, R = N/K, D head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.model import GPTStage
from megalite.model.attention import needs_repeated_heads
from megalite.model.block import Block
from megalite.model.mlp import GatedMLP
from megalite.model.norms import RMSNorm

__all__ = ["Cache", "Decoder"]


@dataclass
class Cache:
    """Keys and values of every layer, and how many of each row's are filled, [B] on the host."""

    keys: list[Tensor]
    values: list[Tensor]
    lengths: list[int]


class Decoder:
    """stage: the whole model on one rank, in evaluation mode."""

    def __init__(self, stage: GPTStage) -> None:
        assert stage.embedding is not None and stage.head is not None and stage.ctx.tp.size == 1, "generation needs the whole model"
        self.config, self._stage = stage.config, stage
        self._layers = [_Layer(block) for block in stage.layers.values() if isinstance(block, Block)]
        self._word = stage.embedding.word.weight.detach()
        self._positions = None if stage.embedding.position is None else stage.embedding.position.weight.detach()
        head = stage.head.output.weight if stage.head.output is not None else stage.embedding.word.weight
        self._head = head.detach()[: self.config.known_vocab_size]
        self._rotations: tuple[Tensor, Tensor] | None = None

    @property
    def longest(self) -> int | None:
        """Tokens up to which a cache is right; None: without end."""
        scaling_ends = self.config.rope_scaling == "dynamic"  # beyond the original length all keys turn otherwise with every token
        original = self.config.rope_scaling_original_length
        return original if scaling_ends and original is not None else self.config.max_position_embeddings

    def new_cache(self, rows: int, capacity: int) -> Cache:
        shape = (rows, self.config.num_kv_heads, capacity, self.config.head_dim)
        self._prepare_rotations(capacity)
        # zeros: what is masked out is multiplied by 0, which not every value survives
        keys, values = ([self._word.new_zeros(shape) for _ in self._layers] for _ in range(2))
        return Cache(keys, values, [0] * rows)

    def prefill(self, cache: Cache, row: int, ids: Sequence[int], chunk: int = 512) -> Tensor:
        """Read a prompt into an empty row, `chunk` tokens at a time. Returns the logits [V] of what follows, fp32."""
        assert cache.lengths[row] == 0 and ids, "a prompt is read once"
        device, logits = self._word.device, None
        for first in range(0, len(ids), chunk):
            tokens = torch.tensor([ids[first : first + chunk]], device=device)
            positions = torch.arange(first, first + tokens.shape[1], device=device)[None]
            logits = self._forward(cache, slice(row, row + 1), tokens, positions)
            cache.lengths[row] += tokens.shape[1]
        assert logits is not None
        return logits[0]

    def step(self, cache: Cache, tokens: Sequence[int]) -> Tensor:
        """One more token in every row. Returns logits [B, V], fp32."""
        device = self._word.device
        positions = torch.tensor(cache.lengths, device=device)[:, None]
        logits = self._forward(cache, slice(0, len(tokens)), torch.tensor(tokens, device=device)[:, None], positions)
        cache.lengths = [length + 1 for length in cache.lengths]
        return logits

    @torch.no_grad()
    def _prepare_rotations(self, capacity: int) -> None:
        """Not in inference mode: the model keeps frequencies, and could not be trained with them any more."""
        if self._stage.rotary is not None and (self._rotations is None or self._rotations[0].shape[0] < capacity):
            cos, sin = self._stage.rotary(torch.arange(capacity, device=self._word.device)[None], length=1)
            cos, sin = cos[:, 0, 0], sin[:, 0, 0]
            self._rotations = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    @torch.inference_mode()
    def _forward(self, cache: Cache, rows: slice, tokens: Tensor, positions: Tensor) -> Tensor:
        """tokens, positions: [B, T]. Returns logits of each row's last token, fp32 [B, V]."""
        x = F.embedding(tokens, self._word)
        if self._positions is not None:
            x = x + F.embedding(positions, self._positions)
        rotation = None
        if self._rotations is not None:
            cos, sin = self._rotations
            rotation = cos[positions].unsqueeze(2), sin[positions].unsqueeze(2)  # [B, T, 1, R]
        view = _View(cache, rows, positions, self.config.sliding_window)
        for number, layer in enumerate(self._layers):
            x = layer.forward(x, number, rotation, view)
        assert self._stage.head is not None
        return F.linear(_norm(self._stage.head.norm, x[:, -1]), self._head).float()


class _View:
    """What the tokens of one call see: all rows' keys up to the longest of them, and which of these each token may look at."""

    def __init__(self, cache: Cache, rows: slice, positions: Tensor, window: int | None) -> None:
        self.cache, self.rows, self.positions = cache, rows, positions
        lengths = cache.lengths[rows]
        self.num_new = positions.shape[1]
        self.start, self.is_even = lengths[0], len(set(lengths)) == 1
        self.end = max(lengths) + self.num_new
        needs_mask = not self.is_even or self.num_new > 1 or (window is not None and window < self.end)
        self.mask = self._mask(window) if needs_mask else None
        self.is_first = self.is_even and self.start == 0 and (window is None or window >= self.end)
        self.row_numbers = torch.arange(len(lengths), device=positions.device)[:, None]

    def _mask(self, window: int | None) -> Tensor:
        """Bool [B, 1, T, L]."""
        keys = torch.arange(self.end, device=self.positions.device)
        queries = self.positions[:, None, :, None]
        allowed = keys <= queries
        return allowed if window is None else allowed & (keys > queries - window)

    def store(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: [B, T, K, D] of the new tokens. Returns all up to the newest, [B, K, L, D]."""
        found = []
        for memory, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
            part = memory[self.rows]
            if self.is_even:
                part[:, :, self.start : self.end] = new.transpose(1, 2)
            else:
                part.transpose(1, 2)[self.row_numbers, self.positions] = new
            found.append(part[:, :, : self.end])
        return found[0], found[1]


class _Layer:
    """One block's weights, joined."""

    def __init__(self, block: Block) -> None:
        attention, mlp = block.attention, block.mlp
        self.block, self.attention, self.mlp, self.head_dim = block, attention, mlp, attention.head_dim
        self.qkv, self.qkv_bias, sizes = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        self.groups = sizes[2] // self.head_dim
        up = [mlp.gate_proj, mlp.up_proj] if isinstance(mlp, GatedMLP) else [mlp.up_proj]
        self.up, self.up_bias, _ = _join(up)
        self.out, self.out_bias = _parts(attention.o_proj)
        self.down, self.down_bias = _parts(mlp.down_proj)

    def forward(self, x: Tensor, number: int, rotation: tuple[Tensor, Tensor] | None, view: _View) -> Tensor:
        """[B, T, H] -> [B, T, H]."""
        heads = F.linear(_norm(self.block.attention_norm, x), self.qkv, self.qkv_bias).unflatten(-1, (-1, self.head_dim))
        turning, v = heads.split((heads.shape[2] - self.groups, self.groups), dim=2)  # q and k turn together
        q, k = turning.split((turning.shape[2] - self.groups, self.groups), dim=2)
        if self.attention.q_norm is not None and self.attention.k_norm is not None:
            q, k = self.attention.q_norm(q), self.attention.k_norm(k)
            turning = torch.cat((q, k), dim=2)
        if rotation is not None:
            q, k = _turned(turning, *rotation).split((q.shape[2], self.groups), dim=2)
        x = x + F.linear(self._attend(q, *view.store(number, k, v), view), self.out, self.out_bias)
        up = F.linear(_norm(self.block.mlp_norm, x), self.up, self.up_bias)
        if isinstance(self.mlp, GatedMLP):
            gate, value = up.chunk(2, dim=-1)
            hidden = F.silu(gate).mul_(value)
        else:
            hidden = self.mlp.activation(up)
        return x + F.linear(hidden, self.down, self.down_bias)

    def _attend(self, q_BTND: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, view: _View) -> Tensor:
        """-> [B, T, N * D]."""
        groups = k_BKLD.shape[1]
        if view.num_new == 1:
            q_BKRD = q_BTND.squeeze(1).unflatten(1, (groups, -1))
            return F.scaled_dot_product_attention(q_BKRD, k_BKLD, v_BKLD, attn_mask=view.mask).flatten(1).unsqueeze(1)
        q, k, v = q_BTND.transpose(1, 2), k_BKLD, v_BKLD
        mask = None if view.is_first else view.mask
        is_grouped = q.shape[1] != groups
        if is_grouped and needs_repeated_heads(q.device, q.dtype, masked=mask is not None):
            k, v = (part.repeat_interleave(q.shape[1] // groups, dim=1) for part in (k, v))
            is_grouped = False
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)
        return out.transpose(1, 2).flatten(2)


def _norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm with few operations: on so few numbers each of them costs more than its arithmetic."""
    if not isinstance(norm, RMSNorm) or x.dtype is not torch.float32 or x.is_cuda:
        return norm(x)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(norm.epsilon))).mul_(norm.weight)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`model.rope.rotate` with tables for both halves, the sines of the first negative: [B, T, N, D], [B, T, 1, R] twice."""
    width = cos.shape[-1]
    rotated = x[..., :width].to(cos.dtype)
    swapped = torch.cat((rotated[..., width // 2 :], rotated[..., : width // 2]), dim=-1)
    turned = torch.addcmul(rotated * cos, swapped, sin).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _parts(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    bias = layer.bias
    return layer.weight.detach(), None if bias is None else bias.detach()  # type: ignore[union-attr, operator]


@torch.no_grad()
def _join(layers: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None, list[int]]:
    """(weight, bias, rows of each): one memory for all, of which the layers' parameters are made views."""
    joined: list[Tensor | None] = []
    sizes = [int(layer.weight.shape[0]) for layer in layers]  # type: ignore[union-attr, arg-type]
    for name in ("weight", "bias"):
        parameters = [getattr(layer, name) for layer in layers]
        if parameters[0] is None:
            joined.append(None)
            continue
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split(sizes), strict=True):
            parameter.data = part
        joined.append(whole)
    assert joined[0] is not None
    return joined[0], joined[1], sizes
