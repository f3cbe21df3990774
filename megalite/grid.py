"""The process grid: ranks laid out on named axes, and one process group per line of ranks.

Decisions
- Axes from outermost to innermost are `pp, dp_replicate, dp_shard, cp, tp`: tp changes fastest, so that it stays inside a node.
- The rank arithmetic (`GridShape`) is pure: layouts of a thousand ranks are checked without a process group.
- A `Grid` is passed by hand; layers receive the `Axis` they work on. There is no global parallel state.
- `dp` is the product of `dp_replicate` and `dp_shard`; `embedding` joins the first and last pipeline stage, whose tied embedding copies
  sum their gradients. Both are lines of ranks like the axes.
- All lines are made by `new_group` with our own time-out (a `DeviceMesh` would make them with a default one), then handed to the mesh.
- Every rank makes the same number of groups in the same order, and the lines of one turn cover the world. NCCL splits a group off the
  world's communicator, which all ranks must take part in; and torch names a group after its ranks and the number of groups before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from megalite.errors import ConfigError

__all__ = ["AXES", "Axis", "Grid", "GridShape", "Progress", "twin_axis"]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, kw_only=True)
class GridShape:
    """Sizes of the axes; pure arithmetic between ranks and coordinates."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        bad = [f"{name} is {size}; an axis has at least 1 rank" for name, size in zip(AXES, self.sizes, strict=True) if size < 1]
        if bad:
            raise ConfigError(bad)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, name) for name in AXES)

    @property
    def world_size(self) -> int:
        return prod(self.sizes)

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    def coords_of(self, rank: int) -> dict[str, int]:
        """Position of `rank` along every axis."""
        coords = {}
        for name, size in reversed(list(zip(AXES, self.sizes, strict=True))):
            rank, coords[name] = divmod(rank, size)
        assert rank == 0, "rank is outside the grid"
        return {name: coords[name] for name in AXES}

    def rank_of(self, **coords: int) -> int:
        """Rank at the given position; axes that are left out are at 0."""
        rank = 0
        for name, size in zip(AXES, self.sizes, strict=True):
            rank = rank * size + coords.get(name, 0)
        return rank

    def lines(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only along `axes`, each in ascending rank order."""
        fixed = [name for name in AXES if name not in axes]
        lines = []
        for outer in product(*(range(getattr(self, name)) for name in fixed)):
            place = dict(zip(fixed, outer, strict=True))
            inner = product(*(range(getattr(self, name)) for name in AXES if name in axes))
            moving = [name for name in AXES if name in axes]
            lines.append([self.rank_of(**place, **dict(zip(moving, step, strict=True))) for step in inner])
        return lines

    def line_of(self, rank: int, *axes: str) -> list[int]:
        """The line along `axes` that `rank` lies on (cheap: does not enumerate the other lines)."""
        place = self.coords_of(rank)
        moving = [name for name in AXES if name in axes]
        steps = product(*(range(getattr(self, name)) for name in moving))
        return [self.rank_of(**{**place, **dict(zip(moving, step, strict=True))}) for step in steps]


@dataclass
class Progress:
    """What the run is doing, for error messages and the watchdog, and the log of collectives while one is being recorded.

    last_comm: (operation, axis name) that was last started or waited for, num_comms: how many were. is_long: in work that may take many
    times as long as a step.
    """

    doing: str = "start-up"
    records: list[Any] | None = None
    last_comm: tuple[str, str] | None = None
    num_comms: int = 0
    is_long: bool = False

    @contextmanager
    def long_work(self) -> Iterator[None]:
        """What happens inside may take many times as long as a step."""
        self.is_long = True
        try:
            yield
        finally:
            self.is_long = False


@dataclass(frozen=True)
class Axis:
    """A named line of ranks as one rank sees it.

    `rank` is the position along the axis, `ranks` the global ranks on the line, `group` the process group (None where the size is 1 and
    no process group exists), `mesh` the one-dimensional mesh that DTensor placements refer to.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None
    progress: Progress = field(default_factory=Progress, compare=False)
    is_rehearsal: bool = False

    @classmethod
    def rehearsal(cls, name: str, size: int, rank: int = 0) -> Axis:
        """An axis of ranks that do not exist: operations over it send nothing, and give results of the right shape without values.

        For tensors without values (`planner.rehearsal`).
        """
        return cls(name, size, rank, tuple(range(size)), is_rehearsal=True)

    @classmethod
    def single(cls, name: str = "tp") -> Axis:
        """An axis of one rank, without any process group."""
        return cls(name, 1, 0, (0,))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


@dataclass(frozen=True)
class Grid:
    """All axes of one run, as one rank sees them."""

    shape: GridShape
    rank: int
    device: torch.device
    mesh: DeviceMesh
    progress: Progress
    pp: Axis
    dp: Axis
    dp_replicate: Axis
    dp_shard: Axis
    cp: Axis
    tp: Axis
    embedding: Axis
    world: Axis

    @property
    def world_size(self) -> int:
        return self.shape.world_size

    @classmethod
    def build(cls, shape: GridShape, device: torch.device | str = "cpu", timeout: timedelta | None = None) -> Grid:
        """Make every line of `shape` over the default process group, which must exist (`init_distributed` makes it).

        Collective: every rank calls it with the same shape. Raises ConfigError when the world has another size.
        """
        world_size, rank = dist.get_world_size(), dist.get_rank()
        if shape.world_size != world_size:
            sizes = " x ".join(f"{name} {size}" for name, size in zip(AXES, shape.sizes, strict=True))
            raise ConfigError(f"the layout {sizes} needs {shape.world_size} ranks, but {world_size} were launched")
        device, progress = torch.device(device), Progress()
        ranks = {name: shape.line_of(rank, name) for name in AXES}
        groups = {name: _line_group(ranks[name], timeout) for name in AXES}
        layout = torch.arange(world_size, dtype=torch.int).reshape(shape.sizes)
        mesh = DeviceMesh.from_group([groups[name] for name in AXES], device.type, layout, mesh_dim_names=AXES)

        def axis(name: str, line: Sequence[int], group: dist.ProcessGroup, sub: DeviceMesh | None = None) -> Axis:
            place = line.index(rank) if rank in line else -1
            return Axis(name, len(line), place, tuple(line), group, sub, progress)

        axes = {name: axis(name, ranks[name], groups[name], mesh[name]) for name in AXES}
        dp_line = shape.line_of(rank, "dp_replicate", "dp_shard")
        dp_group = _first_equal(dp_line, ranks, groups) or _line_group(dp_line, timeout)
        return cls(
            shape=shape,
            rank=rank,
            device=device,
            mesh=mesh,
            progress=progress,
            dp=axis("dp", dp_line, dp_group),
            embedding=_embedding_axis(shape, rank, axes["pp"], timeout),
            world=axis("world", list(range(world_size)), dist.group.WORLD),  # type: ignore[arg-type]
            **axes,
        )

    @classmethod
    def rehearsal(cls, shape: GridShape, rank: int = 0) -> Grid:
        """The grid that rank `rank` of `shape` would see, of ranks that do not exist (`Axis.rehearsal`): no groups, no mesh."""
        progress = Progress()

        def axis(name: str, line: Sequence[int]) -> Axis:
            place = line.index(rank) if rank in line else -1
            return Axis(name, len(line), place, tuple(line), progress=progress, is_rehearsal=len(line) > 1)

        pp = shape.line_of(rank, "pp")
        return cls(
            shape=shape,
            rank=rank,
            device=torch.device("cpu"),
            mesh=None,  # type: ignore[arg-type]
            progress=progress,
            dp=axis("dp", shape.line_of(rank, "dp_replicate", "dp_shard")),
            embedding=axis("embedding", [pp[0], pp[-1]] if len(pp) > 1 else pp),
            world=axis("world", list(range(shape.world_size))),
            **{name: axis(name, shape.line_of(rank, name)) for name in AXES},
        )


def twin_axis(axis: Axis, timeout: timedelta | None = None) -> Axis:
    """The same ranks with a process group of their own, for work beside training's. Collective over the axis."""
    return replace(axis, name=f"{axis.name} (beside training)", group=_line_group(axis.ranks, timeout), progress=Progress())


def _line_group(line: Sequence[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """The group of one line; only its members take part, so a big world starts as fast as a small one."""
    group = dist.new_group(list(line), timeout=timeout, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup), "a rank only makes lines that it lies on"
    return group


def _first_equal(line: Sequence[int], ranks: dict[str, list[int]], groups: dict[str, dist.ProcessGroup]) -> dist.ProcessGroup | None:
    return next((groups[name] for name in AXES if ranks[name] == list(line)), None)


def _embedding_axis(shape: GridShape, rank: int, pp: Axis, timeout: timedelta | None) -> Axis:
    """First and last pipeline rank of this line; ranks between them get an axis on which they have no place (rank -1)."""
    if pp.size == 1:
        return Axis("embedding", 1, 0, (rank,), progress=pp.progress)
    ends, between = (pp.ranks[0], pp.ranks[-1]), pp.ranks[1:-1]
    # The ranks between make a group that nobody uses, because it is their turn as well (see the decisions above).
    group = _line_group(between if rank in between else ends, timeout) if between else pp.group
    if rank in between:
        return Axis("embedding", 2, -1, ends, progress=pp.progress)
    return Axis("embedding", 2, ends.index(rank), ends, group, progress=pp.progress)
