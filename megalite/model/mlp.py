"""The feed-forward part of a block: up, activation, down.

Decisions:
- Gated (swiglu): silu(gate_proj(x)) * up_proj(x), two parameters that share one gather of x. Others:
  activation(up_proj(x)).
- "gelu" is the exact form with erf, "gelu_tanh" the tanh approximation: two models, so two names.
- up is split by columns over tp, down by rows: one reduction per MLP.
- recompute_activation: the activation is computed again in the backward pass, and down_proj does not keep what it is given.
- down_proj starts with std / sqrt(2 x layers), because 2 x layers branches add up in the residual stream.

Legend: S sequence, B micro-batch, H hidden, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.model.recompute import droppable, forgetting
from megalite.model.swiglu import swiglu
from megalite.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, column_parallel_layers
from megalite.tensor_parallel.parameter import ParallelContext
from megalite.tensor_parallel.rng import DropoutKey

__all__ = ["MLP", "GatedMLP", "build_mlp", "output_std"]


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu_squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu_squared": _relu_squared,
}


def output_std(config: ModelConfig) -> float:
    """Initial standard deviation of the two projections of a block that write into the residual stream."""
    return config.init_method_std / (2 * config.num_layers) ** 0.5


class MLP(nn.Module):
    """down(activation(up(x))): [S, B, H] -> [S, B, H] (under sequence parallelism, S is this rank's share). key: for adapters."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, *, recompute_activation: bool = False) -> None:
        super().__init__()
        self.recompute_activation = recompute_activation
        self.activation = ACTIVATIONS[config.activation]
        bias, std = config.has_mlp_bias, config.init_method_std
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.ffn_size, bias=bias, std=std, ctx=ctx)
        self.down_proj = RowParallelLinear(config.ffn_size, config.hidden_size, bias=bias, std=output_std(config), ctx=ctx)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        with forgetting(x):
            up = self.up_proj(x, key)
        hidden = droppable(self.activation, up) if self.recompute_activation else self.activation(up)
        with forgetting(hidden):
            return self.down_proj(hidden, key)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [S, B, H] -> [S, B, H] (under sequence parallelism, S is this rank's share). key: for adapters."""

    def __init__(self, config: ModelConfig, ctx: ParallelContext, *, recompute_activation: bool = False) -> None:
        super().__init__()
        self.recompute_activation = recompute_activation
        bias, std = config.has_mlp_bias, config.init_method_std
        self.gate_proj = ColumnParallelLinear(config.hidden_size, config.ffn_size, bias=bias, std=std, ctx=ctx)
        self.up_proj = ColumnParallelLinear(config.hidden_size, config.ffn_size, bias=bias, std=std, ctx=ctx)
        self.down_proj = RowParallelLinear(config.ffn_size, config.hidden_size, bias=bias, std=output_std(config), ctx=ctx)

    def forward(self, x: Tensor, key: DropoutKey | None = None) -> Tensor:
        with forgetting(x):
            gate, up = column_parallel_layers(x, [self.gate_proj, self.up_proj], key)
        hidden = droppable(swiglu, gate, up) if self.recompute_activation else swiglu(gate, up)
        with forgetting(hidden):
            return self.down_proj(hidden, key)


def build_mlp(config: ModelConfig, ctx: ParallelContext, *, recompute_activation: bool = False) -> MLP | GatedMLP:
    """The MLP that the configuration asks for."""
    kind = GatedMLP if config.activation == "swiglu" else MLP
    return kind(config, ctx, recompute_activation=recompute_activation)
