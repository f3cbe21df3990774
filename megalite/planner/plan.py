"""The memory of one pipeline rank, predicted from its configuration.

Decision
- How a stage is built is the caller's business (`training.setup`): this package is below it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megalite.config import RunConfig
from megalite.model.gpt import GPTStage
from megalite.optim import Optimizer, collect_parameters
from megalite.pipeline.lowering import Program
from megalite.pipeline.p2p import MOST_LEAVING
from megalite.planner.rehearsal import BatchShape, give_memory, rehearse
from megalite.planner.states import ParameterShape, Sharding, StateMemory, state_memory
from megalite.planner.walk import activation_peak
from megalite.tensor_parallel.deferral import WeightGradQueue

__all__ = ["BuildStage", "RankMemory", "parameter_shapes", "plan_rank"]

BuildStage = Callable[[int, WeightGradQueue | None], GPTStage]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank. activations: at the worst moment of a step, with messages and working memory."""

    states: StateMemory
    activations: int

    @property
    def total(self) -> int:
        """Peak of a step."""
        states = self.states
        step = states.gradients + states.waiting + states.gathered + states.buffers + self.activations
        return states.weights + states.optimizer + step

    def rows(self) -> dict[str, int]:
        """{what: bytes}; they add up to `total`."""
        states = self.states
        return {
            "weights (fp32)": states.weights,
            "optimizer state": states.optimizer,
            "gradients": states.gradients + states.waiting,
            "gathered weights": states.gathered,
            "communication buffers": states.buffers,
            "activations": self.activations,
        }


def plan_rank(
    config: RunConfig, program: Program, rank: int, build: BuildStage, sharding: Sharding, shape: BatchShape, *, splits_backward: bool
) -> RankMemory:
    """config: resolved. build(stage, queue): a stage on the meta device, over an axis of ranks that need not exist."""
    numbers = program.schedule.stages_of(rank)
    stages = {
        number: rehearse(lambda queue, number=number: build(number, queue), shape, splits_backward=splits_backward) for number in numbers
    }
    parameters = [shape for number in numbers for shape in parameter_shapes(config, build(number, None), number)]
    peak = activation_peak(program, rank, stages, shape.edge_bytes, MOST_LEAVING)
    states = state_memory(parameters, sharding)
    integers = sum(buffer.nbytes for number in numbers for buffer in build(number, None).buffers())
    return RankMemory(states=replace(states, weights=states.weights + integers), activations=peak)


def parameter_shapes(config: RunConfig, stage: GPTStage, number: int) -> list[ParameterShape]:
    """Of a stage on the meta device, in order of use."""
    with FakeTensorMode():
        give_memory(stage, torch.float32)
        state = _state_itemsizes(config, stage)
    names = {id(parameter): f"{number} {name}" for name, unit in stage.units() for parameter in unit.parameters()}
    return [
        ParameterShape(
            unit=names.get(id(parameter), f"{number}"),
            shape=tuple(parameter.shape),
            state_itemsize=state.get(id(parameter), 0.0),
            is_trained=parameter.requires_grad,
        )
        for parameter in stage.parameters()
    ]


def _state_itemsizes(config: RunConfig, stage: GPTStage) -> dict[int, float]:
    """{id of a parameter: bytes of optimizer state per element on its device}, read from the optimizer itself."""
    if config.optim.optimizer_cpu_offload and config.train.device != "cpu":
        return {}
    parameters = collect_parameters([stage])
    state = Optimizer(parameters, replace(config.optim, lr_multipliers=(), weight_decay_multipliers=())).named_state()
    return {
        id(parameter.parameter): sum(moment.nbytes for moment in state[parameter.name].values()) / parameter.parameter.numel()
        for parameter in parameters
    }
