"""Causal self-attention with grouped keys and values, heads split over tp.

Decisions:
- q, k and v are separate parameters (no interleaved rows to get wrong) that share one gather of x.
- Each tp rank computes N/tp query heads. With fewer key/value heads than ranks, K divides tp: k_proj and v_proj stay
  whole on every rank, each rank uses the rows of the one head that its queries belong to, and the gradients are
  summed over tp (ColumnParallelLinear's num_shards).
- The softmax runs in torch's scaled_dot_product_attention. Its kernels that broadcast key/value heads by themselves
  are the flash and cuDNN ones (half precision on GPUs, anything on CPUs); the memory-efficient kernel, the only one
  for fp32 on GPUs, needs heads repeated. Without the distinction an fp32 run on a GPU would silently materialise S x
  S scores.
- Every token sees all earlier tokens of its sequence, or of its document where the batch numbers documents, or the nearest
  ones only (sliding window). The two latter are an explicit S x S mask, which rules out the flash kernel; the others need
  heads repeated with it.
- Heads are split over tp, so attention dropout draws other numbers on every tp rank.

Legend: S sequence, B micro-batch, H hidden, N query heads, K key/value heads, D head size; `_local` is this tp rank's
share.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.errors import ConfigError
from megalite.model.mlp import output_std
from megalite.model.norms import RMSNorm
from megalite.model.recompute import forgetting, recompute
from megalite.model.rope import Rotation, rotate
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_layers
from megalite.tensor_parallel.parameter import ParallelContext
from megalite.tensor_parallel.rng import DropoutKey, seed_dropout

__all__ = ["Attention", "attention_mask", "needs_repeated_heads"]


class Attention(nn.Module):
    """Projections, rotation, softmax attention and output projection of one block.

    recompute_core: compute the softmax attention again in the backward pass.
    Raises ConfigError when the heads cannot be split over tp.
    """

    def __init__(self, config: ModelConfig, ctx: ParallelContext, *, recompute_core: bool = False) -> None:
        super().__init__()
        self.recompute_core = recompute_core
        heads, kv_heads, self.head_dim = config.num_attention_heads, config.num_kv_heads, config.head_dim
        _check_heads(heads, kv_heads, ctx.tp.size)
        self.tp, self.dropout_p = ctx.tp, config.attention_dropout
        hidden, width, std = config.hidden_size, heads * self.head_dim, config.init_method_std
        bias = config.has_qkv_bias
        shards = kv_heads if kv_heads < ctx.tp.size else None
        kv_width = kv_heads * self.head_dim
        self.q_proj = ColumnParallelLinear(hidden, width, bias=bias, std=std, ctx=ctx)
        self.k_proj = ColumnParallelLinear(hidden, kv_width, bias=bias, std=std, num_shards=shards, ctx=ctx)
        self.v_proj = ColumnParallelLinear(hidden, kv_width, bias=bias, std=std, num_shards=shards, ctx=ctx)
        self.o_proj = RowParallelLinear(width, hidden, bias=config.has_attention_output_bias, std=output_std(config), ctx=ctx)
        self.q_norm = self.k_norm = None
        if config.qk_layernorm:  # every tp rank sees its own heads only
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.norm_epsilon, ctx, partial_over_tp=ctx.tp.size > 1) for _ in "qk")

    def forward(self, x: Tensor, rotation: Rotation | None, key: DropoutKey, mask: Tensor | None = None) -> Tensor:
        """[S, B, H] -> [S, B, H] (under sequence parallelism both are this rank's share of S).

        mask: of `attention_mask`, None for causal attention.
        """
        with forgetting(x):
            projected = column_parallel_layers(x, [self.q_proj, self.k_proj, self.v_proj], key)
        q_SBND, k_SBKD, v_SBKD = (y.unflatten(-1, (-1, self.head_dim)) for y in projected)
        if self.q_norm is not None and self.k_norm is not None:
            q_SBND, k_SBKD = self.q_norm(q_SBND), self.k_norm(k_SBKD)
        if rotation is not None:
            q_SBND, k_SBKD = rotate(q_SBND, rotation), rotate(k_SBKD, rotation)
        if self.recompute_core:
            attended = recompute(lambda q, k, v: self._attend(q, k, v, key, mask), q_SBND, k_SBKD, v_SBKD)
        else:
            attended = self._attend(q_SBND, k_SBKD, v_SBKD, key, mask)
        return self.o_proj(attended.flatten(2), key)

    def _attend(self, q_SBND: Tensor, k_SBKD: Tensor, v_SBKD: Tensor, key: DropoutKey, mask: Tensor | None) -> Tensor:
        p = self.dropout_p if self.training else 0.0
        if p > 0.0:
            seed_dropout(key, "attention", q_SBND.device, self.tp.rank)
        q, k, v = (y.permute(1, 2, 0, 3) for y in (q_SBND, k_SBKD, v_SBKD))
        grouped = q.shape[1] != k.shape[1]
        if grouped and needs_repeated_heads(q.device, q.dtype, masked=mask is not None):
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
            grouped = False
        out_BNSD = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p, is_causal=mask is None, enable_gqa=grouped)
        return out_BNSD.permute(2, 0, 1, 3)


def attention_mask(positions: int, document_ids: Tensor | None, window: int | None, device: torch.device) -> Tensor | None:
    """Bool [B or 1, 1, S, S]: True where query i may attend to key j, an earlier token or itself; None where that is all.

    document_ids: [B, S], of the same document only. window: of the nearest keys only, the token itself among them.
    """
    if window is not None and window >= positions:
        window = None
    if document_ids is None and window is None:
        return None
    if document_ids is None:
        allowed = torch.ones(1, 1, positions, positions, dtype=torch.bool, device=device)
    else:
        allowed = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    allowed = allowed.tril()
    return allowed if window is None else allowed.triu(1 - window)


def needs_repeated_heads(device: torch.device, dtype: torch.dtype, *, masked: bool = False) -> bool:
    """Whether the best attention kernel there cannot broadcast key/value heads over query heads."""
    return device.type == "cuda" and (dtype is torch.float32 or masked)


def _check_heads(heads: int, kv_heads: int, tp: int) -> None:
    violations = []
    if heads % kv_heads:
        violations.append(f"{heads} query heads cannot share {kv_heads} key/value heads evenly: use a divisor of {heads}")
    if heads % tp:
        violations.append(f"{heads} query heads cannot be split over {tp} tp ranks: use a tp size that divides {heads}")
    if kv_heads % tp and tp % kv_heads:
        violations.append(f"{kv_heads} key/value heads cannot be split over {tp} tp ranks nor shared by them: one must be a divisor")
    if violations:
        raise ConfigError(violations)
