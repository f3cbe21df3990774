"""What the tests of parallel layers share: their context, and parameters and gradients as whole tensors."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalite.grid import Axis, Grid, GridShape
from megalite.tensor_parallel import ParallelContext

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}


def tp_axis(size: int) -> Axis:
    return Grid.build(GridShape(tp=size), timeout=timedelta(seconds=30)).tp


def context(size: int, sequence_parallel: bool) -> ParallelContext:
    return ParallelContext(tp_axis(size), sequence_parallel and size > 1, "cpu")


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def share(x: Tensor, tp: Axis, dim: int = 0) -> Tensor:
    """This rank's slice, as a leaf that asks for a gradient when `x` does."""
    return x.detach().chunk(tp.size, dim)[tp.rank].clone().requires_grad_(x.requires_grad)


def own_part(parameter: Tensor, full: Tensor) -> Tensor:
    """The part of `full` that this rank holds of `parameter`, by its placement."""
    if not isinstance(parameter, DTensor):
        return full
    (placement,) = parameter.placements
    if placement.is_replicate():
        return full
    mesh = parameter.device_mesh
    return full.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]  # type: ignore[attr-defined]


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@torch.no_grad()
def load(module: nn.Module, **full: Tensor) -> None:
    """Give the module's parameters their parts of these whole tensors."""
    for name, value in full.items():
        parameter = getattr(module, name)
        local(parameter).copy_(own_part(parameter, value))


def assert_near(actual: Tensor | None, expected: Tensor | None, what: str) -> None:
    if expected is None or actual is None:
        assert actual is expected, f"{what}: {actual} instead of {expected}"
        return
    atol = TOLERANCE[expected.dtype] * max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, msg=lambda text: f"{what}: {text}")


def assert_gradient(parameter: Tensor, expected: Tensor | None, what: str) -> None:
    """The gradient has the parameter's placements, and its local part is that of the whole gradient `expected`."""
    gradient = parameter.grad
    if gradient is None or expected is None:
        assert gradient is expected, f"{what}: {gradient} instead of {expected}"
        return
    if isinstance(parameter, DTensor):
        assert isinstance(gradient, DTensor), what
        assert gradient.placements == parameter.placements, what
    assert_near(local(gradient), own_part(parameter, expected), what)
