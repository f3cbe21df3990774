"""What an action and a message cost: the input of the simulator and of the schedules that plan with times.

Times have no unit; they are whatever the numbers are in. Costs are per stage (chunk) and micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.errors import ConfigError
from megalite.pipeline.schedules.actions import Action, Kind

__all__ = ["Cost", "CostModel"]

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class CostModel:
    """Time of one action: one number for all stages, or a tuple with one number per stage.

    backward: time of an undivided backward B; None: I + W.

    A message between two ranks arrives `latency + message_bytes / bandwidth` after it left; the bytes (not the latency)
    occupy the connection, so that the next message the same way leaves later. overlap_communication: False keeps the
    sending rank busy until its message has arrived. overlapped_pair: time of a forward and a full backward that the
    schedule marks as one block; None: their sum, one after the other. Raises ConfigError for negative numbers.
    """

    forward: Cost = 1.0
    input_grad: Cost = 1.0
    weight_grad: Cost = 1.0
    latency: float = 0.0
    message_bytes: float = 0.0
    bandwidth: float = math.inf
    overlap_communication: bool = True
    overlapped_pair: float | None = None
    backward: Cost | None = None

    def __post_init__(self) -> None:
        for name in ("forward", "input_grad", "weight_grad", "latency", "message_bytes", "overlapped_pair", "backward"):
            value = getattr(self, name)
            numbers = value if isinstance(value, tuple) else (value,) if value is not None else (0,)
            if not all(0 <= number < math.inf for number in numbers):
                raise ConfigError(f"cost model: {name} is {value}, it must be a finite number and cannot be negative")
        if not self.bandwidth > 0:
            raise ConfigError(f"cost model: bandwidth is {self.bandwidth}, it must be above 0")

    def duration(self, action: Action) -> float:
        """Time that this action occupies its rank."""
        if action.kind is Kind.FORWARD:
            return _of_stage(self.forward, action.stage)
        if action.kind is Kind.INPUT_GRAD:
            return _of_stage(self.input_grad, action.stage)
        if action.kind is Kind.WEIGHT_GRAD:
            return _of_stage(self.weight_grad, action.stage)
        if self.backward is not None:
            return _of_stage(self.backward, action.stage)
        return _of_stage(self.input_grad, action.stage) + _of_stage(self.weight_grad, action.stage)

    @property
    def transfer_time(self) -> float:
        """Time that a message occupies its connection."""
        return self.message_bytes / self.bandwidth

    def check_stages(self, num_stages: int) -> None:
        """Raises ConfigError when a per-stage cost has another number of stages."""
        for name in ("forward", "input_grad", "weight_grad", "backward"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ConfigError(f"cost model: {name} has {len(value)} numbers for {num_stages} stages")


def _of_stage(cost: Cost, stage: int) -> float:
    return cost[stage] if isinstance(cost, tuple) else cost
