"""What a schedule is made of: actions, the order of each rank, and where each stage lives.

Stages are global virtual stage numbers 0 .. p*v-1 in model order; `placement` says which rank holds each. Round robin
puts chunk c of rank r at stage c*p + r, the V places two chunks, r on the way down and 2p-1-r on the way back, so that
the first and the last stage share rank 0.

Letters: p ranks, r one of them, v model chunks per rank, m micro-batches per step.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = ["Action", "Kind", "Schedule", "dependencies", "product", "round_robin", "v_placement"]


class Kind(StrEnum):
    """What an action computes. A backward is one B, or its two halves I (what the previous stage waits for) and W."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"

    __hash__ = str.__hash__  # Enum's own is written in Python, and every set of actions would wait for it


class Action(NamedTuple):
    """One computation: `kind` for one micro-batch on one global stage."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Schedule:
    """Who computes what in which order.

    placement[stage] is the rank of a stage; orders[rank] are its actions. `has_backward` is False for evaluation.
    `overlapped` are the forwards that are meant to run as one block with the full backward right behind them; the block
    is a remark for the cost model: the two are ordinary consecutive actions, and whoever runs them one by one is right.
    """

    name: str
    num_ranks: int
    num_microbatches: int
    num_chunks: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]
    has_backward: bool = True
    overlapped: frozenset[Action] = frozenset()

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The global stages on this rank in model order: its chunks."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def label(self, action: Action) -> str:
        """Short name of an action inside its rank: kind, micro-batch and, with several chunks, the chunk's letter."""
        text = f"{action.kind}{action.microbatch}"
        if self.num_chunks == 1:
            return text
        if not 0 <= action.stage < self.num_stages:
            return f"{text}?"
        chunk = self.placement[: action.stage].count(self.placement[action.stage])
        return text + (string.ascii_lowercase[chunk] if chunk < 26 else f".{chunk}")


def product(action: Action) -> Action:
    """What others can wait for: I gives the same input gradient as B, so both are filed under B."""
    return action._replace(kind=Kind.BACKWARD) if action.kind is Kind.INPUT_GRAD else action


def dependencies(action: Action, num_stages: int) -> list[Action]:
    """The products that must exist before this action can start; see `product`."""
    kind, stage, microbatch = action
    if kind is Kind.FORWARD:
        return [Action(Kind.FORWARD, stage - 1, microbatch)] if stage > 0 else []
    if kind is Kind.WEIGHT_GRAD:
        return [Action(Kind.BACKWARD, stage, microbatch)]
    needed = [Action(Kind.FORWARD, stage, microbatch)]
    if stage < num_stages - 1:
        needed.append(Action(Kind.BACKWARD, stage + 1, microbatch))
    return needed


def round_robin(num_ranks: int, num_chunks: int) -> tuple[int, ...]:
    """placement with chunk c of rank r at stage c*p + r. p=2, v=2: 0 1 0 1."""
    return tuple(range(num_ranks)) * num_chunks


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """placement of two chunks: down the ranks and back. p=3: 0 1 2 2 1 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))
