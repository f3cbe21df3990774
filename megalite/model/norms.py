"""RMSNorm and LayerNorm over the hidden size.

Decisions:
- Statistics are fp32 whatever the input's type is (torch's kernels do that); the result has the input's type.
- Weights (and LayerNorm's bias) are replicated over tp. Under sequence parallelism every tp rank sees only its part
  of the sequence, so their gradients are partial: `partial_over_tp` puts them on the list of gradients that are
  summed over tp once per step.
- torch multiplies with the weight before it rounds to bf16; implementations that round first differ by that one
  rounding, in bf16 only.

Legend: H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.rms_norm import rms_norm
from megalite.tensor_parallel.deferral import add_later
from megalite.tensor_parallel.parameter import ParallelContext, ParameterInfo, add_parameter, to_local

__all__ = ["LayerNorm", "RMSNorm", "build_norm"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * weight over the last dim: [..., H] -> [..., H].

    partial_over_tp: each tp rank sees a part of what is normalised; None: under sequence parallelism only.
    """

    weight: torch.Tensor

    def __init__(self, size: int, epsilon: float, ctx: ParallelContext, *, partial_over_tp: bool | None = None) -> None:
        super().__init__()
        self.size, self.epsilon, self.weight_grads = size, epsilon, ctx.weight_grads
        _add_norm_parameter(self, "weight", size, ctx, partial_over_tp)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, add_later(to_local(self.weight), self.weight_grads), self.epsilon)


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + epsilon) * weight + bias over the last dim: [..., H] -> [..., H]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, size: int, epsilon: float, ctx: ParallelContext) -> None:
        super().__init__()
        self.size, self.epsilon, self.weight_grads = size, epsilon, ctx.weight_grads
        _add_norm_parameter(self, "weight", size, ctx)
        _add_norm_parameter(self, "bias", size, ctx)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = (add_later(to_local(p), self.weight_grads) for p in (self.weight, self.bias))
        if x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16):
            weight, bias = weight.float(), bias.float()  # beside 16-bit weights torch keeps 16-bit statistics for backward
        return F.layer_norm(x, (self.size,), weight, bias, self.epsilon)


def _add_norm_parameter(module: nn.Module, name: str, size: int, ctx: ParallelContext, partial_over_tp: bool | None = None) -> None:
    init = "ones" if name == "weight" else "zeros"
    partial = ctx.sequence_parallel if partial_over_tp is None else partial_over_tp
    info = ParameterInfo(role="norm", init=init, partial_over_tp=partial)
    add_parameter(module, name, (size,), tp=ctx.tp, shard_dim=None, info=info, device=ctx.device)


def build_norm(config: ModelConfig, ctx: ParallelContext) -> RMSNorm | LayerNorm:
    """The norm that the configuration asks for, over the hidden size."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(config.hidden_size, config.norm_epsilon, ctx)
