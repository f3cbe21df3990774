"""What changes during training besides weights and optimizer moments, and must survive a restart.

It is this little because the rest are pure functions: the learning rate of the step, the data order of `consumed_samples`, and every
random number of (seed, sample, layer).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """step counts optimizer updates that were made; consumed_samples counts training sequences that were used."""

    step: int = 0
    consumed_samples: int = 0
