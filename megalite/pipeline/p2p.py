"""Letters between stages: what a stage's computation needs and what it gives, whether the neighbour is on this rank or another one.

Decisions
- Shape and dtype of what travels are agreed once (`Edge`), so nothing is negotiated during a step.
- A receive is posted when its instruction is reached and waited for by the computation that needs it. A send is started and forgotten;
  its tensor stays alive until the transfer is over. The program's order is proven free of deadlock even if sends were to block
  (pipeline/lowering.py), so looser behaviour cannot deadlock either; and because every rank starts its transfers in one common order,
  NCCL, which executes them in that order, cannot either.
- gloo does not say that a send is over before it is waited for. So a rank waits for its oldest send before it starts one more than
  `MOST_LEAVING`; otherwise it would keep every message of the step. That the order allows for sends that block is proven.
- Stages on the same rank hand over the tensor itself.

Legend: S sequence (this rank's share under sequence parallelism), B micro-batch, H hidden.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalite import comm
from megalite.grid import Axis
from megalite.pipeline.lowering import Transfer

__all__ = ["MOST_LEAVING", "Edge", "Letter", "Mailbox"]

MOST_LEAVING = 4
"""Sends of a rank that may be under way at one time."""


@dataclass(frozen=True)
class Edge:
    """What travels between two stages: hidden states [S, B, H] one way and their gradients the other way."""

    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: torch.device

    def new_buffer(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Letter(NamedTuple):
    """Address of one tensor: payload kind ("F" hidden states, "B" gradient), the stage that needs it, the micro-batch."""

    kind: str
    stage: int
    microbatch: int


class Mailbox:
    """Tensors on their way to the stages of this rank, and transfers under way to other ranks."""

    def __init__(self, edge: Edge, pp: Axis) -> None:
        self._edge, self._pp = edge, pp
        self._arriving: dict[Letter, comm.Pending] = {}
        self._here: dict[Letter, Tensor] = {}
        self._leaving: deque[comm.Pending] = deque()

    def put(self, letter: Letter, tensor: Tensor) -> None:
        """Leave a tensor for a stage of this rank, or for a `send` that follows."""
        assert letter not in self._here, f"{letter} is already here"
        self._here[letter] = tensor

    def take(self, letter: Letter) -> Tensor:
        """The tensor for `letter`; waits until it has arrived."""
        if letter in self._arriving:
            return self._arriving.pop(letter).wait()
        return self._here.pop(letter)

    def send(self, transfer: Transfer) -> None:
        tensor = self._here.pop(_address(transfer))
        assert tuple(tensor.shape) == self._edge.shape and tensor.dtype == self._edge.dtype, (
            f"stage {transfer.source_stage} gives {tuple(tensor.shape)} {tensor.dtype}, the edge carries {self._edge}"
        )
        while self._leaving and (self._leaving[0].is_over() or len(self._leaving) == MOST_LEAVING):
            self._leaving.popleft().wait()
        self._leaving.append(comm.start_send(tensor, self._pp, transfer.target_rank))

    def receive(self, transfer: Transfer) -> None:
        self._arriving[_address(transfer)] = comm.start_recv(self._edge.new_buffer(), self._pp, transfer.source_rank)

    def finish(self) -> None:
        """Wait for all sends; nothing may be left over."""
        while self._leaving:
            self._leaving.popleft().wait()
        assert not self._arriving and not self._here, "tensors were sent that no stage took"


def _address(transfer: Transfer) -> Letter:
    return Letter(str(transfer.kind), transfer.target_stage, transfer.microbatch)
