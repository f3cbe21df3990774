"""The model again, written from its formulas: one function on a dictionary of whole parameters, batch first, nothing shared with megalite.

Legend: B micro-batch, S sequence, H hidden, N query heads, K key/value heads, D head size, V vocab.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.data.batch import MicroBatch

Parameters = dict[str, Tensor]


def reference_logits(params: Parameters, config: ModelConfig, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
    """[B, S, V] without the columns that only pad the vocabulary."""
    x = params["embedding.word.weight"][tokens]
    if config.position_embedding_type == "learned_absolute":
        x = x + params["embedding.position.weight"][positions]
    for layer in range(config.num_layers):
        name = f"layers.{layer}"
        x = x + _attention(params, config, f"{name}.attention", _norm(params, config, f"{name}.attention_norm", x), positions, documents)
        x = x + _mlp(params, config, f"{name}.mlp", _norm(params, config, f"{name}.mlp_norm", x))
    tied = not config.untie_embeddings_and_output_weights
    output = params["embedding.word.weight" if tied else "head.output.weight"]
    return (_norm(params, config, "head.norm", x) @ output.T)[..., : config.vocab_size]


def reference_loss_sum(params: Parameters, config: ModelConfig, batch: MicroBatch) -> Tensor:
    logits = reference_logits(params, config, batch.tokens, batch.position_ids, batch.document_ids)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    return (losses * batch.loss_mask.flatten()).sum()


def _linear(params: Parameters, name: str, x: Tensor) -> Tensor:
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def _norm(params: Parameters, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    weight, epsilon = params[f"{name}.weight"], config.norm_epsilon
    if config.normalization == "RMSNorm":
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight + params[f"{name}.bias"]


def _turn(x: Tensor, positions: Tensor, config: ModelConfig) -> Tensor:
    """x [B, S, heads, D]: channels i and i + R/2 are one complex number, which is multiplied by exp(i * angle)."""
    size = int(config.head_dim * config.rotary_percent)
    half = size // 2
    angles = [[[p * config.rotary_base ** (-2 * i / size) for i in range(half)] for p in row] for row in positions.tolist()]
    turn = torch.polar(torch.ones(*positions.shape, half), torch.tensor(angles))
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:size].contiguous()) * turn[:, :, None]
    return torch.cat([turned.real, turned.imag, x[..., size:]], dim=-1)


def _attention(params: Parameters, config: ModelConfig, name: str, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    batch, length, _ = x.shape
    q, k, v = (_linear(params, f"{name}.{part}_proj", x).view(batch, length, -1, config.head_dim) for part in ("q", "k", "v"))
    if config.position_embedding_type == "rope":
        q, k = _turn(q, positions, config), _turn(k, positions, config)
    hidden = torch.ones(length, length).triu(1).bool().repeat(batch, 1, 1)
    for row, ids in enumerate([] if documents is None else documents.tolist()):
        for query, key in itertools.product(range(length), repeat=2):
            hidden[row, query, key] |= ids[query] != ids[key]
    queries_per_head = config.num_attention_heads // config.num_kv_heads
    heads = []
    for head in range(config.num_attention_heads):
        key, value = k[:, :, head // queries_per_head], v[:, :, head // queries_per_head]
        scores = q[:, :, head] @ key.transpose(1, 2) / math.sqrt(config.head_dim)
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value)
    return _linear(params, f"{name}.o_proj", torch.cat(heads, dim=-1))


def _mlp(params: Parameters, config: ModelConfig, name: str, x: Tensor) -> Tensor:
    up = _linear(params, f"{name}.up_proj", x)
    if config.activation == "swiglu":
        gate = _linear(params, f"{name}.gate_proj", x)
        inner = gate * torch.sigmoid(gate) * up
    elif config.activation == "gelu":
        inner = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
    elif config.activation == "gelu_tanh":
        inner = 0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
    else:
        inner = up.clamp(min=0) ** 2
    return _linear(params, f"{name}.down_proj", inner)
