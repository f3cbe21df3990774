"""Executes a program: the one path of every training and evaluation step, with one stage or many.

Decisions
- The runtime knows nothing about the model: a stage is a function (hidden states or None, micro-batch) -> hidden states, or, for the
  last stage, the *sum* of its token losses.
- The loss is divided in one place, here, before the backward pass, by a number that is the same on all ranks. Everything after that is
  a sum, so gradients do not depend on how the batch was cut.
- Which micro-batch's backward is a stage's last is read from the program; data parallelism is told before each backward.
- A stage's input and output are dropped by its backward; hidden states that were sent are dropped when the transfer is over.

Legend: S sequence, B micro-batch, H hidden; a stage's input and output are [S, B, H].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.grid import Axis
from megalite.pipeline.lowering import Compute, Program, Recv, Send
from megalite.pipeline.p2p import Edge, Letter, Mailbox
from megalite.pipeline.schedules import Action, Kind

__all__ = ["PipelineRuntime", "StageFunction"]

StageFunction = Callable[[Tensor | None, Any], Tensor]


class BackwardHook(Protocol):
    """Told before each backward; `is_last` marks a stage's last backward of the step."""

    def before_backward(self, stage: int, is_last: bool) -> None: ...


class PipelineRuntime:
    """Runs programs for the stages of this rank.

    stages: {global stage number: stage function}. Only one step runs at a time.
    """

    def __init__(self, stages: Mapping[int, StageFunction], pp: Axis, edge: Edge, hook: BackwardHook | None = None) -> None:
        self._stages, self._pp, self._edge, self._hook = stages, pp, edge, hook

    def train_step(self, program: Program, microbatches: Sequence[Any], loss_divisor: float | Tensor) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to the parameters.

        Returns this rank's undivided sum of token losses (0 where it has no last stage), an fp32 scalar.
        """
        return _Step(self, program, microbatches, loss_divisor).run()

    @torch.no_grad()
    def evaluate(self, program: Program, microbatches: Sequence[Any]) -> Tensor:
        """Forward only. Returns this rank's sum of token losses (0 where it has no last stage), an fp32 scalar."""
        return _Step(self, program, microbatches, None).run()


class _Step:
    """State of one step: live activations, letters, the loss so far."""

    def __init__(
        self, runtime: PipelineRuntime, program: Program, microbatches: Sequence[Any], loss_divisor: float | Tensor | None
    ) -> None:
        schedule = program.schedule
        assert len(microbatches) == schedule.num_microbatches, "the program is for another number of micro-batches"
        assert (loss_divisor is not None) == schedule.has_backward, "training needs backwards, evaluation has none"
        self.stages, self.hook = runtime._stages, runtime._hook
        self.instructions = program.instructions[runtime._pp.rank]
        self.microbatches, self.loss_divisor = microbatches, loss_divisor
        self.last_stage, self.placement = schedule.num_stages - 1, schedule.placement
        self.progress, self.doing = runtime._pp.progress, runtime._pp.progress.doing
        self.mailbox = Mailbox(runtime._edge, runtime._pp)
        self.live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=runtime._edge.device)
        self.last_backward = _last_backwards(self.instructions)

    def run(self) -> Tensor:
        for number, instruction in enumerate(self.instructions):
            if isinstance(instruction, Compute):
                self.progress.doing = f"{self.doing}, {_describe(instruction.action)}"
                self.compute(instruction.action, number)
            elif isinstance(instruction, Send):
                self.mailbox.send(instruction.transfer)
            elif isinstance(instruction, Recv):
                self.mailbox.receive(instruction.transfer)
            else:
                raise AssertionError(f"unknown instruction {instruction}")
        self.mailbox.finish()
        self.progress.doing = self.doing
        return self.loss_sum

    def compute(self, action: Action, number: int) -> None:
        if action.kind == Kind.FORWARD:
            self.forward(action.stage, action.microbatch)
        elif action.kind == Kind.BACKWARD:
            self.backward(action.stage, action.microbatch, is_last=self.last_backward[action.stage] == number)
        else:
            raise AssertionError(f"the runtime cannot execute {action.kind}")

    def forward(self, stage: int, microbatch: int) -> None:
        x = self.mailbox.take(Letter("F", stage, microbatch)) if stage > 0 else None
        if x is not None and self.loss_divisor is not None:
            x.requires_grad_()
        out = self.stages[stage](x, self.microbatches[microbatch])
        if stage == self.last_stage:
            self.loss_sum += out.detach()
            out = out / self.loss_divisor if self.loss_divisor is not None else out
        else:
            self.mailbox.put(Letter("F", stage + 1, microbatch), out.detach())
        if self.loss_divisor is not None:
            self.live[stage, microbatch] = (x, out)

    def backward(self, stage: int, microbatch: int, is_last: bool) -> None:
        x, out = self.live.pop((stage, microbatch))
        grad = self.mailbox.take(Letter("B", stage, microbatch)) if stage < self.last_stage else None
        if self.hook is not None:
            self.hook.before_backward(stage, is_last)
        torch.autograd.backward(out, grad)
        if x is not None:
            assert x.grad is not None, f"stage {stage} does not use its input"
            self.mailbox.put(Letter("B", stage - 1, microbatch), x.grad)


def _last_backwards(instructions: Sequence[Compute | Send | Recv]) -> dict[int, int]:
    """{stage: number of the instruction that is its last backward}."""
    return {
        instruction.action.stage: number
        for number, instruction in enumerate(instructions)
        if isinstance(instruction, Compute) and instruction.action.kind == Kind.BACKWARD
    }


def _describe(action: Action) -> str:
    return f"{action.kind.name.lower().replace('_', ' ')} of micro-batch {action.microbatch} on stage {action.stage}"
