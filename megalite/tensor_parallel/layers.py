"""The three layers that hold tensor-parallel weights: column-parallel and row-parallel linear, vocabulary-parallel
embedding.

Decisions
- A layer holds parameters and says how they are cut; the arithmetic and its collectives are in `linear` and `mappings`.
- Layers that share an input (q, k, v or gate, up) stay separate parameters and run through one `column_parallel_layers`
  call.
- Fewer key/value heads than tp ranks: the weight stays whole on every rank, each rank multiplies with the rows of its
  heads, and its gradient is a part of the whole (`partial_over_tp`).
- A row-parallel bias is added once, after the sum over tp. Under sequence parallelism each rank sees its positions
  only, so the bias' gradient is partial.
- A layer may be given an adapter (`lora`), with which its weight is multiplied beside two small ones, and its frozen weight may be
  replaced by integers (`quantized`).
- Parameters have no values until `init_parameter_`: the values depend on the parameter's full name, which a layer does
  not know.

The embedding's collectives: one all-reduce forward, or with sequence parallelism one reduce-scatter forward and one
all-gather backward.

Legend: S sequence, B micro-batch, H hidden, V padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor, nn

from megalite.errors import ConfigError, DataError
from megalite.tensor_parallel.deferral import deferrable_embedding
from megalite.tensor_parallel.fp8 import Product, column_parallel_product, later_weight, row_parallel_product
from megalite.tensor_parallel.linear import column_parallel, row_parallel
from megalite.tensor_parallel.lora import Adapter, AdapterShape, Where, adapted_columns, adapted_row
from megalite.tensor_parallel.mappings import reduce_from_tp, reduce_scatter_to_sp
from megalite.tensor_parallel.parameter import ParallelContext, ParameterInfo, Role, add_parameter, to_local
from megalite.tensor_parallel.quantized import Int8Weight, QuantizedWeight, int8_product
from megalite.tensor_parallel.rng import DropoutKey

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "column_parallel_layers"]


class ColumnParallelLinear(nn.Module):
    """y = x @ weight.T + bias, the out features cut over tp.

    weight [out, in] and bias [out] are cut along dimension 0. `num_shards` is the number of pieces that the out
    features may be cut into (key/value heads); with fewer pieces than ranks the weight stays whole and rank r uses
    piece r * num_shards // tp. Raises ConfigError when the pieces and tp do not divide one another.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        ctx: ParallelContext,
        *,
        bias: bool,
        std: float,
        num_shards: int | None = None,
        role: Role = "linear",
        valid_rows: int | None = None,
        copy_of: str | None = None,
        shared_over_pp: bool = False,
    ) -> None:
        super().__init__()
        tp = ctx.tp
        self.in_features, self.out_features = in_features, out_features
        self.tp, self.sequence_parallel, self.weight_grads = tp, ctx.sequence_parallel, ctx.weight_grads
        self.product = ctx.product if role == "linear" else None
        self.adapter: Adapter | None = None
        self.quantized: QuantizedWeight | None = None
        self.num_shards = num_shards
        self.is_whole = num_shards is not None and num_shards < tp.size
        _check_shards(out_features, num_shards, tp.size)
        shard_dim = None if self.is_whole else 0
        weight_info = ParameterInfo(
            role=role,
            init="normal",
            std=std,
            partial_over_tp=self.is_whole,
            valid_rows=valid_rows,
            copy_of=copy_of,
            shared_over_pp=shared_over_pp,
        )
        shape = (out_features, in_features)
        add_parameter(self, "weight", shape, tp=tp, shard_dim=shard_dim, info=weight_info, device=ctx.device)
        if bias:
            info = ParameterInfo(role="bias", init="zeros", partial_over_tp=self.is_whole)
            add_parameter(self, "bias", (out_features,), tp=tp, shard_dim=shard_dim, info=info, device=ctx.device)
        else:
            self.register_parameter("bias", None)

    @property
    def adapter_shape(self) -> AdapterShape:
        """What an adapter of this layer must be made for."""
        rows = self._rows() if self.is_whole else None
        return AdapterShape(in_features=self.in_features, out_features=self.out_features, shard_dim=None if self.is_whole else 0, rows=rows)

    def local_weight(self) -> Tensor:
        """The rows [out_local, in] that this rank multiplies with."""
        return self._own_rows(to_local(self.weight))

    def local_factor(self) -> Tensor | Int8Weight:
        """`local_weight`, or the integers in its place."""
        if self.quantized is None:
            return self.local_weight()
        return Int8Weight(*(self._own_rows(part) for part in self.quantized.local()))

    def local_bias(self) -> Tensor | None:
        """[out_local], or None."""
        return None if self.bias is None else self._own_rows(to_local(self.bias))

    def _own_rows(self, x: Tensor) -> Tensor:
        return x.narrow(0, *self._rows()) if self.is_whole else x

    def _rows(self) -> tuple[int, int]:
        """The first of this rank's rows of a weight that is whole, and their number."""
        assert self.num_shards is not None
        length = self.out_features // self.num_shards
        return self.tp.rank * self.num_shards // self.tp.size * length, length

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        """[S, B, in], or [S_local, B, in] under sequence parallelism -> [S, B, out_local]. key: for an adapter's dropout."""
        return column_parallel_layers(x, [self], key)[0]

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


def _check_shards(out_features: int, num_shards: int | None, tp_size: int) -> None:
    if num_shards is None:
        return
    if out_features % num_shards != 0:
        raise ConfigError(f"{out_features} out features cannot be cut into {num_shards} equal pieces")
    if max(num_shards, tp_size) % min(num_shards, tp_size) != 0:
        raise ConfigError(
            f"{num_shards} pieces (key/value heads) and tensor-parallel size {tp_size} do not divide one another; "
            "choose a tp that divides the number of heads or is a multiple of it"
        )


def column_parallel_layers(x: Tensor, layers: Sequence[ColumnParallelLinear], key: DropoutKey | None = None) -> tuple[Tensor, ...]:
    """The outputs of several layers of one input, with one gather and one reduced dx; see `column_parallel`.

    key: for the dropout of adapters.
    """
    first = layers[0]
    weights = [layer.local_factor() for layer in layers]
    biases = [layer.local_bias() for layer in layers]
    where = (first.tp, first.sequence_parallel, first.weight_grads)
    product = int8_product if first.quantized is not None else first.product
    adapters = [layer.adapter for layer in layers]
    if any(adapter is not None for adapter in adapters):
        nothing = [None] * len(weights)
        other = None if product is None else lambda x: column_parallel_product(x, weights, nothing, *where, product)
        return adapted_columns(x, weights, biases, adapters, Where(*where), key, other)
    if product is not None:
        return column_parallel_product(x, weights, biases, *where, product)
    return column_parallel(x, cast("list[Tensor]", weights), biases, *where)


class RowParallelLinear(nn.Module):
    """y = x @ weight.T + bias, the in features cut over tp: it takes what a column-parallel layer gives.

    weight [out, in] is cut along dimension 1, bias [out] is whole on each rank.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, ctx: ParallelContext, *, bias: bool, std: float) -> None:
        super().__init__()
        tp = ctx.tp
        self.in_features, self.out_features = in_features, out_features
        self.tp, self.sequence_parallel, self.weight_grads = tp, ctx.sequence_parallel, ctx.weight_grads
        self.product = ctx.product
        self.adapter: Adapter | None = None
        self.quantized: QuantizedWeight | None = None
        info = ParameterInfo(role="linear", init="normal", std=std)
        add_parameter(self, "weight", (out_features, in_features), tp=tp, shard_dim=1, info=info, device=ctx.device)
        if bias:
            info = ParameterInfo(role="bias", init="zeros", partial_over_tp=ctx.sequence_parallel)
            add_parameter(self, "bias", (out_features,), tp=tp, shard_dim=None, info=info, device=ctx.device)
        else:
            self.register_parameter("bias", None)

    @property
    def adapter_shape(self) -> AdapterShape:
        """What an adapter of this layer must be made for."""
        return AdapterShape(in_features=self.in_features, out_features=self.out_features, shard_dim=1)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        """[S, B, in_local] -> [S, B, out], or [S_local, B, out] under sequence parallelism. key: for an adapter's dropout."""
        weight = to_local(self.weight) if self.quantized is None else self.quantized.local()
        bias = None if self.bias is None else to_local(self.bias)
        where = (self.tp, self.sequence_parallel, self.weight_grads)
        product = cast("Product | None", self.product if self.quantized is None else int8_product)
        if self.adapter is not None:
            other = None if product is None else lambda x: product(x, later_weight(weight, self.weight_grads))
            return adapted_row(x, weight, bias, self.adapter, Where(*where), key, other)
        if product is not None:
            return row_parallel_product(x, weight, bias, *where, product)
        return row_parallel(x, cast("Tensor", weight), bias, *where)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}, tp={self.tp.size}"


class VocabParallelEmbedding(nn.Module):
    """Rows of weight [V, H], cut over tp along the padded vocabulary; rows from `valid_rows` on are padding."""

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        ctx: ParallelContext,
        *,
        std: float,
        valid_rows: int,
        shared_over_pp: bool = False,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.valid_rows = num_embeddings, embedding_dim, valid_rows
        self.tp, self.sequence_parallel, self.weight_grads = ctx.tp, ctx.sequence_parallel, ctx.weight_grads
        info = ParameterInfo(role="embedding", init="normal", std=std, valid_rows=valid_rows, shared_over_pp=shared_over_pp)
        shape = (num_embeddings, embedding_dim)
        add_parameter(self, "weight", shape, tp=ctx.tp, shard_dim=0, info=info, device=ctx.device)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [S, B] -> [S, B, H], or [S_local, B, H] under sequence parallelism.

        Raises DataError for a token outside the vocabulary where that can be seen without waiting for the device.
        """
        check_tokens(tokens, self.valid_rows)
        weight, tp = to_local(self.weight), self.tp
        if tp.size == 1:
            return deferrable_embedding(tokens, weight, self.weight_grads)
        num_rows = weight.shape[0]
        row = tokens - tp.rank * num_rows
        is_foreign = (row < 0) | (row >= num_rows)
        # A foreign token looks up some row, spread by the remainder: if all took row 0, its gradient would be a sum of
        # most positions.
        part = deferrable_embedding(row.remainder(num_rows), weight, self.weight_grads)
        part = part.masked_fill_(is_foreign.unsqueeze(-1), 0.0)
        return reduce_scatter_to_sp(part, tp) if self.sequence_parallel else reduce_from_tp(part, tp)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings} x {self.embedding_dim}, {self.valid_rows} valid, tp={self.tp.size}"


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise DataError when a token is not in [0, vocab_size); only on the CPU, where looking does not stall the
    device, and not where tensors have no values (they are of a class of their own)."""
    if tokens.device.type != "cpu" or tokens.numel() == 0 or type(tokens) is not Tensor:
        return
    low, high = (int(value) for value in tokens.aminmax())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"tokens go from {low} to {high}, but the vocabulary has {vocab_size}; "
            "use the tokenizer that made the data, or raise vocab_size"
        )
