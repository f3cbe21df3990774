"""A small model made of stages, and a step over it, for tests of data parallelism and the optimizer.

It has what is hard for them: parameters cut over tp along both dimensions, a replicated one whose gradient is a part,
one that has fewer rows than there are dp ranks, a tied embedding on one stage or two.

Letters: S sequence, B micro-batch, H hidden, F ffn, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite import comm
from megalite.data_parallel import GradientSync, shard_stage
from megalite.grid import Axis, Grid, GridShape
from megalite.optim import OptimParameter, collect_parameters
from megalite.tensor_parallel.init import init_parameter_
from megalite.tensor_parallel.mappings import copy_to_tp, reduce_from_tp
from megalite.tensor_parallel.parameter import (
    ParameterInfo,
    Role,
    add_parameter,
    logical_name,
    named_parameter_info,
    to_local,
)

S, B, H, FFN, V, ROWS = 5, 2, 6, 20, 11, 13
NUM_LAYERS, SEED = 3, 7
TIED = "embedding.weight"


def _add(module: nn.Module, name: str, shape: Sequence[int], tp: Axis, role: Role, dim: int | None = None, **info: object) -> None:
    values = {"init": "normal", "std": 0.3} if len(shape) == 2 else {"init": "ones"}
    record = ParameterInfo(role=role, **values, **info)  # type: ignore[arg-type]
    add_parameter(module, name, shape, tp=tp, shard_dim=dim, info=record, device="meta")


class ToyEmbedding(nn.Module):
    def __init__(self, tp: Axis, shared: bool) -> None:
        super().__init__()
        _add(self, "weight", (ROWS, H), tp, "embedding", valid_rows=V, shared_over_pp=shared)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, to_local(self.weight))


class ToyBlock(nn.Module):
    def __init__(self, tp: Axis) -> None:
        super().__init__()
        self.tp = tp
        _add(self, "scale", (H,), tp, "norm")
        _add(self, "up", (FFN, H), tp, "linear", 0)
        _add(self, "up_bias", (FFN,), tp, "bias", 0)
        _add(self, "down", (H, FFN), tp, "linear", 1)
        _add(self, "gain", (H,), tp, "bias", partial_over_tp=True)
        _add(self, "mix", (2, H), tp, "position")

    def forward(self, x: Tensor) -> Tensor:
        mix = to_local(self.mix)
        y = copy_to_tp(F.rms_norm(x, (H,), to_local(self.scale), 1e-5), self.tp)
        y = F.linear(torch.tanh(F.linear(y, to_local(self.up), to_local(self.up_bias))), to_local(self.down))
        return x * mix[0] + mix[1] + reduce_from_tp(y * to_local(self.gain), self.tp)


class ToyHead(nn.Module):
    def __init__(self, tp: Axis, tied: bool, beside_embedding: bool) -> None:
        super().__init__()
        _add(self, "scale", (H,), tp, "norm")
        self.weight: nn.Parameter | None = None
        if not (tied and beside_embedding):
            info = {"copy_of": TIED if tied else None, "shared_over_pp": tied}
            del self.weight
            _add(self, "weight", (ROWS, H), tp, "head", valid_rows=V, **info)

    def forward(self, x: Tensor, weight: Tensor | None) -> Tensor:
        own = to_local(self.weight if weight is None else weight)
        return F.linear(F.rms_norm(x, (H,), to_local(self.scale), 1e-5), own)


class ToyStage(nn.Module):
    """Stage `number` of `num_stages`; layers are dealt out unevenly, the first stage has one."""

    def __init__(self, tp: Axis, number: int = 0, num_stages: int = 1, tied: bool = False) -> None:
        super().__init__()
        first, last = number == 0, number == num_stages - 1
        layers = range(NUM_LAYERS) if num_stages == 1 else (range(1) if first else range(1, NUM_LAYERS))
        self.tied_here = tied and first and last
        self.embedding = ToyEmbedding(tp, tied and num_stages > 1) if first else None
        self.layers = nn.ModuleDict({str(layer): ToyBlock(tp) for layer in layers})
        self.head = ToyHead(tp, tied, first) if last else None

    def forward(self, x: Tensor | None, tokens: Tensor) -> Tensor:
        """tokens: [S + 1, B]; hidden states [S, B, H], or the fp32 sum of token losses."""
        if self.embedding is not None:
            x = self.embedding(tokens[:-1])
        for block in self.layers.values():
            x = block(x)
        if self.head is None:
            return x
        logits = self.head(x, self.embedding.weight if self.tied_here else None)
        return F.cross_entropy(logits.float().flatten(0, 1)[:, :V], tokens[1:].flatten(), reduction="sum")

    def units(self) -> list[tuple[str, nn.Module]]:
        units = [(f"layers.{name}", block) for name, block in self.layers.items()]
        if self.tied_here:
            return units
        first = [("embedding", self.embedding)] if self.embedding is not None else []
        return first + units + ([("head", self.head)] if self.head is not None else [])


def materialize(prefix: str, module: nn.Module) -> None:
    waiting = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    for part in module.modules():
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device="cpu", recurse=False)
    infos = named_parameter_info(module)
    for name, parameter in module.named_parameters():
        if name in waiting:
            init_parameter_(logical_name(prefix + name, infos[name]), parameter, infos[name], SEED)


def build(
    grid: Grid,
    zero: int,
    *,
    numbers: Iterable[int] = (0,),
    num_stages: int = 1,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype = torch.float32,
) -> dict[int, ToyStage]:
    stages = {}
    for number in numbers:
        stage = ToyStage(grid.tp, number, num_stages, tied)
        settings = dict(zero=zero, compute_dtype=dtype, reduce_dtype=reduce_dtype)
        shard_stage(stage, stage.units(), grid, **settings, materialize=materialize)  # type: ignore[arg-type]
        stages[number] = stage
    return stages


def build_plain(tied: bool = False) -> ToyStage:
    """The whole model on one rank, without any wrapper."""
    stage = ToyStage(Axis.single(), tied=tied)
    materialize("", stage)
    return stage


def microbatches(number: int, step: int) -> list[Tensor]:
    """The global batch of a step: token ids [S + 1, B] each."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randint(0, V, (S + 1, B), generator=generator) for _ in range(number)]


def share(batches: list[Tensor], grid: Grid) -> list[Tensor]:
    return batches[grid.dp.rank :: grid.dp.size]


def order(in_flight: int, num_microbatches: int, num_stages: int) -> list[tuple[str, int, int]]:
    """(F or B, stage, micro-batch): at most `in_flight` micro-batches between forward and backward."""
    actions = []
    for number in range(num_microbatches + in_flight - 1):
        if number < num_microbatches:
            actions += [("F", stage, number) for stage in range(num_stages)]
        if number >= in_flight - 1:
            actions += [("B", stage, number - in_flight + 1) for stage in reversed(range(num_stages))]
    return actions


def train(stages: dict[int, ToyStage], batches: list[Tensor], divisor: int, zero: int, in_flight: int) -> float:
    """Forward and backward of all micro-batches through all stages, which are on this rank; returns the loss sum."""
    sync, live, grads, loss = GradientSync(stages, zero), {}, {}, 0.0
    for kind, stage, number in order(in_flight, len(batches), len(stages)):
        last = stage == len(stages) - 1
        if kind == "F":
            x = live[stage - 1, number][1].detach().requires_grad_() if stage > 0 else None
            out = stages[stage](x, batches[number])
            live[stage, number] = (x, out)
            loss += out.item() if last else 0.0
            continue
        x, out = live.pop((stage, number))
        sync.before_backward(stage, number == len(batches) - 1)
        torch.autograd.backward(out / divisor if last else out, None if last else grads.pop((stage, number)))
        if x is not None:
            grads[stage - 1, number] = x.grad
    return loss


def train_on_pp(stage: ToyStage, grid: Grid, batches: list[Tensor], divisor: int, zero: int) -> None:
    """As `train`, all forwards first, with one stage on each of two pipeline ranks."""
    sync, dtype = GradientSync({grid.pp.rank: stage}, zero), torch.float32
    if grid.pp.is_first:
        outs = []
        for batch in batches:
            outs.append(stage(None, batch))
            comm.start_send(outs[-1], grid.pp, 1).wait()
        for number, out in enumerate(outs):
            grad = comm.start_recv(torch.empty(S, B, H, dtype=dtype), grid.pp, 1).wait()
            sync.before_backward(0, number == len(outs) - 1)
            out.backward(grad)
        return
    pairs = []
    for batch in batches:
        x = comm.start_recv(torch.empty(S, B, H, dtype=dtype), grid.pp, 0).wait().requires_grad_()
        pairs.append((x, stage(x, batch)))
    for number, (x, out) in enumerate(pairs):
        sync.before_backward(1, number == len(pairs) - 1)
        (out / divisor).backward()
        comm.start_send(x.grad, grid.pp, 0).wait()


def plain_gradients(stage: ToyStage, batches: list[Tensor], divisor: int) -> dict[str, Tensor]:
    """Gradients of a plain model by name; they stay in `.grad`."""
    for batch in batches:
        (stage(None, batch) / divisor).backward()
    return {name: parameter.grad for name, parameter in stage.named_parameters()}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def worst_gradient(parameters: list[OptimParameter], expected: dict[str, Tensor]) -> float:
    return max(relative_difference(full(p.parameter.grad), expected[p.name]) for p in parameters)


def worst_value(parameters: list[OptimParameter], plain: ToyStage) -> float:
    expected = dict(plain.named_parameters())
    return max((full(p.parameter.detach()) - expected[p.name].detach()).abs().max().item() for p in parameters)


def grid_of(**sizes: int) -> Grid:
    return Grid.build(GridShape(**sizes))


def parameters_of(stages: dict[int, ToyStage]) -> list[OptimParameter]:
    return collect_parameters(stages.values())
