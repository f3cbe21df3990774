"""Executes a program: the one path of every training and evaluation step, with one stage or many.

Decisions
- The runtime knows nothing about the model: a stage is a function (hidden states or None, micro-batch) -> hidden states, or, for the
  last stage, the *sum* of its token losses.
- The loss is divided in one place, here, before the backward pass, by a number that is the same on all ranks. Everything after that is
  a sum, so gradients do not depend on how the batch was cut.
- Which micro-batch's backward is a stage's last is read from the program; data parallelism is told before each backward.
- Of a stage's output only the place in the graph is kept for the backward: the hidden states themselves are dropped when they have
  been sent. The input is dropped by B or I. After I, only what the weight gradients need is left, until W.

Legend: S sequence, B micro-batch, H hidden; a stage's input and output are [S, B, H].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.grid import Axis
from megalite.pipeline.lowering import Compute, Program, Recv, Send
from megalite.pipeline.p2p import Edge, Letter, Mailbox
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.trace import ActionClock
from megalite.tensor_parallel.deferral import DeferredGrads, WeightGradQueue

__all__ = ["PipelineRuntime", "StageFunction", "splits_backward"]

StageFunction = Callable[[Tensor | None, Any], Tensor]


class BackwardHook(Protocol):
    """Told about each backward, whole (B) or split (I, W); `is_last` marks a stage's last B or W of the step. A stage whose weights
    are all frozen and which takes no input has nothing to differentiate: `without_backward` stands for its last."""

    def before_backward(self, stage: int, is_last: bool) -> None: ...
    def before_input_grad(self, stage: int) -> None: ...
    def after_weight_grad(self, stage: int, is_last: bool) -> None: ...
    def without_backward(self, stage: int) -> None: ...


class PipelineRuntime:
    """Runs programs for the stages of this rank.

    stages: {global stage number: stage function}. weight_grads: the queue that the stages' layers were built with, for
    programs that split backward passes. clock: records when each action of a training step ran; `step` numbers them.
    Only one step runs at a time.
    """

    def __init__(
        self,
        stages: Mapping[int, StageFunction],
        pp: Axis,
        edge: Edge,
        hook: BackwardHook | None = None,
        weight_grads: WeightGradQueue | None = None,
    ) -> None:
        self._stages, self._pp, self._edge, self._hook, self._weight_grads = stages, pp, edge, hook, weight_grads
        self.clock: ActionClock | None = None
        self._num_steps = 0

    def train_step(self, program: Program, microbatches: Sequence[Any], loss_divisor: float | Tensor) -> Tensor:
        """Forward and backward of all micro-batches; gradients are added to the parameters.

        Returns this rank's undivided sum of token losses (0 where it has no last stage), an fp32 scalar.
        """
        loss_sum = _Step(self, program, microbatches, loss_divisor).run()
        self._num_steps += 1
        return loss_sum

    @torch.no_grad()
    def evaluate(self, program: Program, microbatches: Sequence[Any]) -> Tensor:
        """Forward only. Returns this rank's sum of token losses (0 where it has no last stage), an fp32 scalar."""
        step = _Step(self, program, microbatches, None)
        step.clock = None
        return step.run()


class _Step:
    """State of one step: live activations, letters, the loss so far."""

    def __init__(
        self, runtime: PipelineRuntime, program: Program, microbatches: Sequence[Any], loss_divisor: float | Tensor | None
    ) -> None:
        schedule = program.schedule
        assert len(microbatches) == schedule.num_microbatches, "the program is for another number of micro-batches"
        assert (loss_divisor is not None) == schedule.has_backward, "training needs backwards, evaluation has none"
        self.stages, self.hook, self.weight_grads = runtime._stages, runtime._hook, runtime._weight_grads
        self.instructions = program.instructions[runtime._pp.rank]
        self.microbatches, self.loss_divisor = microbatches, loss_divisor
        self.last_stage, self.placement = schedule.num_stages - 1, schedule.placement
        self.progress, self.doing = runtime._pp.progress, runtime._pp.progress.doing
        self.mailbox = Mailbox(runtime._edge, runtime._pp)
        self.clock, self.step = runtime.clock, runtime._num_steps
        self.live: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.deferred: dict[tuple[int, int], DeferredGrads] = {}
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
        tensor = self._take_input(action)
        started = self.clock.start() if self.clock is not None else None
        kind, stage, microbatch = action
        is_last = self.last_backward.get(stage) == number
        if kind == Kind.FORWARD:
            self.forward(stage, microbatch, tensor)
        elif kind == Kind.BACKWARD:
            self.backward(stage, microbatch, tensor, is_last)
        elif kind == Kind.INPUT_GRAD:
            self.input_grad(stage, microbatch, tensor)
        else:
            self.weight_grad(stage, microbatch, is_last)
        if self.clock is not None:
            self.clock.end(self.step, action, started)

    def _take_input(self, action: Action) -> Tensor | None:
        """What the action needs from a neighbouring stage; waits for it."""
        kind, stage, microbatch = action
        if kind == Kind.FORWARD:
            return self.mailbox.take(Letter("F", stage, microbatch)) if stage > 0 else None
        if kind == Kind.WEIGHT_GRAD or stage == self.last_stage:
            return None
        return self.mailbox.take(Letter("B", stage, microbatch))

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> None:
        if x is not None and self.loss_divisor is not None:
            x.requires_grad_()
        out = self.stages[stage](x, self.microbatches[microbatch])
        if stage == self.last_stage:
            self.loss_sum += out.detach()
            out = out / self.loss_divisor if self.loss_divisor is not None else out
        else:
            self.mailbox.put(Letter("F", stage + 1, microbatch), out.detach())
        if self.loss_divisor is not None:
            self.live[stage, microbatch] = (x, get_gradient_edge(out) if out.requires_grad else None)

    def backward(self, stage: int, microbatch: int, grad: Tensor | None, is_last: bool) -> None:
        if self.hook is not None:
            self.hook.before_backward(stage, is_last)
        self._differentiate(stage, microbatch, grad)

    def input_grad(self, stage: int, microbatch: int, grad: Tensor | None) -> None:
        assert self.weight_grads is not None, "this program splits backward passes, the layers were built without a queue"
        if self.hook is not None:
            self.hook.before_input_grad(stage)
        with self.weight_grads.collect() as deferred:
            self._differentiate(stage, microbatch, grad)
        self.deferred[stage, microbatch] = deferred

    def weight_grad(self, stage: int, microbatch: int, is_last: bool) -> None:
        self.deferred.pop((stage, microbatch)).run()
        if self.hook is not None:
            self.hook.after_weight_grad(stage, is_last)

    def _differentiate(self, stage: int, microbatch: int, grad: Tensor | None) -> None:
        x, edge = self.live.pop((stage, microbatch))
        if edge is not None:
            torch.autograd.backward([edge], [torch.ones_like(self.loss_sum) if grad is None else grad])
        elif self.hook is not None and not any(other == stage for other, _ in self.live):
            self.hook.without_backward(stage)
        if x is not None:
            assert x.grad is not None, f"stage {stage} does not use its input"
            self.mailbox.put(Letter("B", stage - 1, microbatch), x.grad)


def splits_backward(program: Program) -> bool:
    """Whether a program needs stages that were built with a queue for weight gradients: some backward is I and W."""
    return any(action.kind == Kind.INPUT_GRAD for order in program.schedule.orders for action in order)


def _last_backwards(instructions: Sequence[Compute | Send | Recv]) -> dict[int, int]:
    """{stage: number of the instruction that completes its gradients: the last B or W}."""
    return {
        instruction.action.stage: number
        for number, instruction in enumerate(instructions)
        if isinstance(instruction, Compute) and instruction.action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRAD)
    }


def _describe(action: Action) -> str:
    return f"{action.kind.name.lower().replace('_', ' ')} of micro-batch {action.microbatch} on stage {action.stage}"
