"""What a model is: sizes, kinds of layers, and the numbers that follow from them.

Decisions
- The padded vocabulary does not depend on the tensor-parallel size: the same seed is the same model for every layout.
- Counts are of the logical model: padding is not counted, a tied head is counted once.

Letters: H hidden, N query heads, K key/value heads, D head size, F ffn, V vocab, S sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megalite.errors import ConfigError

__all__ = ["ModelConfig"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: what it computes, whatever the layout."""

    num_layers: int = 2
    """Transformer blocks."""
    hidden_size: int = 64
    """Width H of the residual stream."""
    num_attention_heads: int = 4
    """Query heads N; the tensor-parallel size must divide them."""
    num_query_groups: int | None = None
    """Key/value heads K of grouped-query attention; not set: as many as query heads."""
    kv_channels: int | None = None
    """Size D of one head; not set: hidden size / heads."""
    ffn_hidden_size: int | None = None
    """Inner width F of the MLP; not set: 4 H, or for swiglu 8/3 H rounded down to a multiple of 64 (at least 64)."""
    vocab_size: int | None = None
    """Vocabulary size V (largest token id + 1); not set: taken from the tokenizer."""
    make_vocab_size_divisible_by: int = 128
    """The embedding has V rounded up to a multiple of this; the added rows stay zero and are never predicted."""
    max_position_embeddings: int | None = None
    """Longest sequence that learned positions can express; not set: the sequence length."""
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    """How positions enter: rotated queries and keys, a learned table added to the embedding, or not at all."""
    rotary_base: float = 10000.0
    """Base (theta) of the rotary frequencies."""
    rotary_percent: float = 1.0
    """Share of each head's channels that are rotated."""
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn"] = "none"
    """How rotary frequencies are stretched for sequences longer than those trained on first."""
    rope_scaling_factor: float = 1.0
    """How many times longer."""
    rope_scaling_original_length: int | None = None
    """Length that was trained on first; not set: the longest position."""
    rope_scaling_low_freq_factor: float = 1.0
    """llama3: wavelengths above the original length over this are stretched in full."""
    rope_scaling_high_freq_factor: float = 4.0
    """llama3: wavelengths below the original length over this are left alone."""
    rope_scaling_beta_fast: float = 32.0
    """yarn: channels that turn more often than this over the original length are left alone."""
    rope_scaling_beta_slow: float = 1.0
    """yarn: channels that turn less often than this are stretched in full."""
    rope_scaling_attention_factor: float | None = None
    """yarn: factor of cosines and sines; not set: it follows from the stretch."""
    rope_scaling_mscale: float | None = None
    """yarn: numerator's share in that factor; with --rope-scaling-mscale-all-dim."""
    rope_scaling_mscale_all_dim: float | None = None
    """yarn: denominator's share in that factor."""
    rope_scaling_truncate: bool = True
    """yarn: round the borders between channels to whole channels."""
    sliding_window: int | None = None
    """Tokens that a token attends to, itself included; not set: all earlier ones."""
    qk_layernorm: bool = False
    """RMSNorm of every query and key head before rotation, with one weight for all heads of a layer."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Normalization before attention, before the MLP and before the head."""
    norm_epsilon: float = 1e-5
    """Added to the variance in every normalization."""
    activation: Literal["swiglu", "gelu", "gelu_tanh", "relu_squared"] = "swiglu"
    """Activation of the MLP; swiglu has a gate projection in addition."""
    add_bias_linear: bool = False
    """Biases in all linear layers of the blocks (never in the head)."""
    add_qkv_bias: bool = False
    """Biases in the query, key and value projections only."""
    add_attention_output_bias: bool = False
    """A bias in the attention's output projection."""
    add_mlp_bias: bool = False
    """Biases in the MLP's projections only."""
    untie_embeddings_and_output_weights: bool = True
    """A head of its own; with --no-... the head is the embedding."""
    hidden_dropout: float = 0.0
    """Dropout after the embedding, attention and MLP."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities."""
    init_method_std: float = 0.02
    """Standard deviation of initial weights; layers that write to the residual stream use std / sqrt(2 x layers)."""

    @property
    def num_kv_heads(self) -> int:
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def rotary_dim(self) -> int:
        """Channels of each head that are rotated; 0 without rotary positions."""
        return int(self.head_dim * self.rotary_percent) if self.position_embedding_type == "rope" else 0

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation == "swiglu":
            return max(64, 8 * self.hidden_size // 3 // 64 * 64)
        return 4 * self.hidden_size

    @property
    def known_vocab_size(self) -> int:
        """V; raises ConfigError while it is not known."""
        if self.vocab_size is None:
            raise ConfigError("the vocabulary size is not known yet: set --vocab-size, or a tokenizer that has one")
        return self.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and the head; raises ConfigError while V is not known."""
        unit = self.make_vocab_size_divisible_by
        return -(-self.known_vocab_size // unit) * unit

    @property
    def has_qkv_bias(self) -> bool:
        return self.add_bias_linear or self.add_qkv_bias

    @property
    def has_attention_output_bias(self) -> bool:
        return self.add_bias_linear or self.add_attention_output_bias

    @property
    def has_mlp_bias(self) -> bool:
        return self.add_bias_linear or self.add_mlp_bias

    @property
    def layer_matmul_weights(self) -> int:
        """Weights of one block that multiply activations: q, k, v, o and the MLP."""
        attention = 2 * self.hidden_size * self.head_dim * (self.num_attention_heads + self.num_kv_heads)
        return attention + (3 if self.activation == "swiglu" else 2) * self.hidden_size * self.ffn_size

    def num_parameters(self) -> int:
        """Logical parameters: rows that only pad the vocabulary are not counted, a tied head is counted once.

        Raises ConfigError while the vocabulary size, or the length of a learned position table, is not known.
        """
        norm = self.hidden_size * (2 if self.normalization == "LayerNorm" else 1)
        layer = self.layer_matmul_weights + self._layer_biases() + 2 * norm + (2 * self.head_dim if self.qk_layernorm else 0)
        embedding = self.known_vocab_size * self.hidden_size * (2 if self.untie_embeddings_and_output_weights else 1)
        return embedding + self._position_weights() + self.num_layers * layer + norm

    def flops_per_token(self, seq_length: int, *, trains_adapters: bool = False) -> int:
        """Model FLOPs of one trained token, forward and backward.

        6 per matmul weight (the head counts, tied or not; the embedding look-up does not) plus 12 S N D per layer for
        attention. The causal mask is not subtracted and recomputed work does not count. trains_adapters: weights are frozen, so
        that the third of their products that gives their gradients is left out; those of adapters are small and do not count.
        Raises ConfigError while the vocabulary size is not known.
        """
        weights = self.num_layers * self.layer_matmul_weights + self.known_vocab_size * self.hidden_size
        attention = self.num_layers * self.num_attention_heads * self.head_dim * seq_length
        return (4 if trains_adapters else 6) * weights + 12 * attention

    def _layer_biases(self) -> int:
        qkv = self.head_dim * (self.num_attention_heads + 2 * self.num_kv_heads) if self.has_qkv_bias else 0
        output = self.hidden_size if self.has_attention_output_bias else 0
        mlp = self.hidden_size + (2 if self.activation == "swiglu" else 1) * self.ffn_size if self.has_mlp_bias else 0
        return qkv + output + mlp

    def _position_weights(self) -> int:
        if self.position_embedding_type != "learned_absolute":
            return 0
        if self.max_position_embeddings is None:
            raise ConfigError("the length of the position table is not known yet: set --max-position-embeddings")
        return self.max_position_embeddings * self.hidden_size
