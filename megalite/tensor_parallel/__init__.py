"""Tensor parallelism: parameters cut over tp, the layers that hold them, and the loss on cut logits."""

from megalite.tensor_parallel.chunked_loss import HeadLoss, LossSettings
from megalite.tensor_parallel.cross_entropy import vocab_parallel_argmax, vocab_parallel_cross_entropy
from megalite.tensor_parallel.deferral import DeferredGrads, WeightGradQueue
from megalite.tensor_parallel.fp8 import fp8_product
from megalite.tensor_parallel.init import init_module_, init_parameter_
from megalite.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    column_parallel_layers,
)
from megalite.tensor_parallel.linear import column_parallel, row_parallel
from megalite.tensor_parallel.mappings import (
    copy_to_tp,
    gather_from_sp,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_to_sp,
    scatter_to_sp,
    scatter_to_tp,
)
from megalite.tensor_parallel.parameter import (
    ParallelContext,
    ParameterInfo,
    Role,
    add_parameter,
    logical_name,
    named_parameter_info,
    to_local,
)
from megalite.tensor_parallel.rng import DropoutKey, dropout, seed_dropout

__all__ = [
    "ColumnParallelLinear",
    "DeferredGrads",
    "DropoutKey",
    "HeadLoss",
    "LossSettings",
    "ParallelContext",
    "ParameterInfo",
    "Role",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "WeightGradQueue",
    "add_parameter",
    "column_parallel",
    "column_parallel_layers",
    "copy_to_tp",
    "dropout",
    "fp8_product",
    "gather_from_sp",
    "gather_from_tp",
    "init_module_",
    "init_parameter_",
    "logical_name",
    "named_parameter_info",
    "reduce_from_tp",
    "reduce_scatter_to_sp",
    "row_parallel",
    "scatter_to_sp",
    "scatter_to_tp",
    "seed_dropout",
    "to_local",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
]
