"""How high the activations of a rank rise in a step: its instructions walked with what each stage keeps.

Decisions
- The list that is walked is the program that will run, receives and sends included, so every schedule is covered.
- A received tensor is there from the moment its receive is posted. A sent one lives until `most_leaving` more are sent.
- Pure Python: it works on numbers of bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.pipeline.lowering import Compute, Program, Recv, Send
from megalite.pipeline.schedules import Action, Kind

__all__ = ["StageMemory", "activation_peak"]


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes for one micro-batch on one rank.

    kept: from the forward to B or I, with the stage's input. deferred: from I to W. The others are how far memory rises, while the
    pass runs, above what is alive when it starts.
    """

    kept: int
    deferred: int
    forward_rise: int
    backward_rise: int
    weight_rise: int


def activation_peak(program: Program, rank: int, stages: Mapping[int, StageMemory], edge_bytes: int, most_leaving: int) -> int:
    """Bytes of activations, messages and working memory at the worst moment of a step. stages: {stage number: ...} of this rank."""
    walk = _Walk(program, rank, stages, edge_bytes, most_leaving)
    for instruction in program.instructions[rank]:
        if isinstance(instruction, Compute):
            walk.compute(instruction.action)
        elif isinstance(instruction, Recv):
            walk.rise(edge_bytes)
        elif isinstance(instruction, Send):
            walk.send()
    return walk.peak


class _Walk:
    def __init__(self, program: Program, rank: int, stages: Mapping[int, StageMemory], edge_bytes: int, most_leaving: int) -> None:
        self.placement, self.last = program.schedule.placement, program.schedule.num_stages - 1
        self.stages, self.edge, self.most_leaving = stages, edge_bytes, most_leaving
        self.live = self.peak = self.leaving = 0

    def rise(self, change: int, above: int = 0) -> None:
        """above: what is needed for a moment beyond what is alive at the start."""
        self.peak = max(self.peak, self.live + above, self.live + change)
        self.live += change

    def send(self) -> None:
        if self.leaving < self.most_leaving:
            self.leaving += 1
        else:
            self.live -= self.edge

    def compute(self, action: Action) -> None:
        """Inputs turn from messages into part of what is kept; results wait to be sent, or for a stage of this rank."""
        memory, (kind, stage, _) = self.stages[action.stage], action
        if kind is Kind.FORWARD:
            self.live -= self.edge if stage > 0 else 0  # counted in `kept`
            self.rise(memory.kept, memory.forward_rise)
            self.live += self.edge if stage < self.last else 0
        elif kind is Kind.WEIGHT_GRAD:
            self.rise(-memory.deferred, memory.weight_rise)
        else:
            arrived = self.edge if stage < self.last else 0
            self.live -= arrived  # counted in `backward_rise`
            left = memory.deferred if kind is Kind.INPUT_GRAD else 0  # some schedules split some of their backwards only
            self.rise(left - memory.kept, memory.backward_rise)
            self.live += self.edge if stage > 0 else 0
