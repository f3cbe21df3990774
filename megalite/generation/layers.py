"""One block's weights as inference uses them: plain products, no gradients, q, k, v and gate, up joined.

Decisions
- At tp 1 the joined weights are one memory and the model's parameters become views of it, so nothing is held twice. Under tp the
  products stay apart, because a parameter there is a piece of a whole that other ranks know about.
- In a step of one token per row, the R query heads that share a key/value head stand where attention has its sequence: keys and
  values are not repeated.

Legend: B rows, T new tokens, L tokens that are looked at, H hidden, N query heads, K key/value heads, R = N/K, D head size; of
heads and widths, this tp rank's share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite import comm
from megalite.generation.cache import View
from megalite.model.attention import needs_repeated_heads
from megalite.model.block import Block
from megalite.model.mlp import GatedMLP
from megalite.model.norms import RMSNorm
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megalite.tensor_parallel.parameter import to_local

__all__ = ["Layer", "apply_norm"]


class Layer:
    """A block without its dropout."""

    def __init__(self, block: Block) -> None:
        attention, mlp = block.attention, block.mlp
        self.block, self.attention, self.mlp, self.head_dim = block, attention, mlp, attention.head_dim
        self.tp = attention.tp
        self.qkv = Joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.groups = self.qkv.sizes[2] // self.head_dim
        self.up = Joined([mlp.gate_proj, mlp.up_proj] if isinstance(mlp, GatedMLP) else [mlp.up_proj])
        self.out, self.out_bias = row_parts(attention.o_proj)
        self.down, self.down_bias = row_parts(mlp.down_proj)

    def forward(self, x: Tensor, number: int, rotation: tuple[Tensor, Tensor] | None, view: View) -> Tensor:
        """[B, T, H] -> [B, T, H]. number: of the layer in the cache; rotation: [B, T, 1, R] twice, of `turned`."""
        heads = self.qkv(apply_norm(self.block.attention_norm, x)).unflatten(-1, (-1, self.head_dim))
        turning, v = heads.split((heads.shape[2] - self.groups, self.groups), dim=2)  # q and k turn together
        q, k = turning.split((turning.shape[2] - self.groups, self.groups), dim=2)
        if self.attention.q_norm is not None and self.attention.k_norm is not None:
            q, k = self.attention.q_norm(q), self.attention.k_norm(k)
            turning = torch.cat((q, k), dim=2)
        if rotation is not None:
            q, k = turned(turning, *rotation).split((q.shape[2], self.groups), dim=2)
        x = x + self._reduced(_attend(q, *view.store(number, k, v), view), self.out, self.out_bias)
        up = self.up(apply_norm(self.block.mlp_norm, x))
        if isinstance(self.mlp, GatedMLP):
            gate, value = up.chunk(2, dim=-1)
            hidden = F.silu(gate).mul_(value)
        else:
            hidden = self.mlp.activation(up)
        return x + self._reduced(hidden, self.down, self.down_bias)

    def _reduced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.tp.size == 1:
            return F.linear(x, weight, bias)
        y = comm.all_reduce(F.linear(x, weight), self.tp)
        return y if bias is None else y.add_(bias)


class Joined:
    """Several linear layers of one input. sizes: rows of each on this rank."""

    def __init__(self, layers: Sequence[ColumnParallelLinear]) -> None:
        weights = [layer.local_weight().detach() for layer in layers]
        biases = [None if bias is None else bias.detach() for bias in (layer.local_bias() for layer in layers)]
        self.sizes = [weight.shape[0] for weight in weights]
        if layers[0].tp.size == 1:
            weights = [_join([layer.weight for layer in layers])]
            biases = [None if biases[0] is None else _join([layer.bias for layer in layers if layer.bias is not None])]
        self.weights, self.biases = weights, biases

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., sum of sizes]."""
        found = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


def apply_norm(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm with few operations: on so few numbers each of them costs more than its arithmetic."""
    if not isinstance(norm, RMSNorm) or x.dtype is not torch.float32 or x.is_cuda:
        return norm(x)
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True).add_(norm.epsilon))).mul_(to_local(norm.weight))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`model.rope.rotate` with tables for both halves, the sines of the first negative: [B, T, N, D], [B, T, 1, R] twice."""
    width = cos.shape[-1]
    rotated = x[..., :width].to(cos.dtype)
    swapped = torch.cat((rotated[..., width // 2 :], rotated[..., : width // 2]), dim=-1)
    result = torch.addcmul(rotated * cos, swapped, sin).to(x.dtype)
    return result if width == x.shape[-1] else torch.cat((result, x[..., width:]), dim=-1)


def row_parts(layer: RowParallelLinear) -> tuple[Tensor, Tensor | None]:
    """Weight (this rank's columns) and bias, without gradients."""
    return to_local(layer.weight).detach(), None if layer.bias is None else to_local(layer.bias).detach()


def _attend(q_BTND: Tensor, k_BKLD: Tensor, v_BKLD: Tensor, view: View) -> Tensor:
    """-> [B, T, N * D]."""
    groups = k_BKLD.shape[1]
    if view.num_new == 1:
        q_BKRD = q_BTND.squeeze(1).unflatten(1, (groups, -1))
        return F.scaled_dot_product_attention(q_BKRD, k_BKLD, v_BKLD, attn_mask=view.mask).flatten(1).unsqueeze(1)
    q, k, v, mask = q_BTND.transpose(1, 2), k_BKLD, v_BKLD, view.mask
    is_grouped = q.shape[1] != groups
    if is_grouped and needs_repeated_heads(q.device, q.dtype, masked=mask is not None):
        k, v = (part.repeat_interleave(q.shape[1] // groups, dim=1) for part in (k, v))
        is_grouped = False
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped)
    return out.transpose(1, 2).flatten(2)


@torch.no_grad()
def _join(parameters: Sequence[Tensor]) -> Tensor:
    """One memory for all, of which the parameters are made views; as it is where they already are."""
    first, pieces, end = parameters[0], [], 0
    for parameter in parameters:
        pieces.append(parameter.data_ptr() == first.data_ptr() + end)
        end += parameter.nbytes
    if all(pieces) and first.untyped_storage().nbytes() == end:
        rows = sum(parameter.shape[0] for parameter in parameters)
        return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([parameter.shape[0] for parameter in parameters]), strict=True):
        parameter.data = part
    return whole
