"""The model of the speed benchmarks as anybody would write it in plain PyTorch: the contender's side, with no code of ours in it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig

__all__ = ["PlainBlock", "PlainModel"]


class PlainBlock(nn.Module):
    """The block of CONFIG, written as anybody would: RMSNorm, grouped-query attention with RoPE, SwiGLU."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        hidden, self.heads, self.groups, self.size = model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(hidden, eps=model.norm_epsilon), nn.RMSNorm(hidden, eps=model.norm_epsilon)
        self.q = nn.Linear(hidden, self.heads * self.size, bias=False)
        self.k = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.v = nn.Linear(hidden, self.groups * self.size, bias=False)
        self.o = nn.Linear(self.heads * self.size, hidden, bias=False)
        self.gate = nn.Linear(hidden, model.ffn_size, bias=False)
        self.up = nn.Linear(hidden, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        y = self.norm1(x)
        q, k, v = (
            layer(y).view(batch, length, heads, self.size).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class PlainModel(nn.Module):
    def __init__(self, model: ModelConfig, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(model.known_vocab_size, model.hidden_size)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.num_layers))
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.head = nn.Linear(model.hidden_size, model.known_vocab_size, bias=False)
        frequencies = model.rotary_base ** (-torch.arange(0, model.head_dim, 2) / model.head_dim)
        angles = torch.arange(length)[:, None] * frequencies
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
