"""What changes during training besides weights and optimizer moments, and must survive a restart.

It is this little because the rest are pure functions: the learning rate of the step, the data order of `consumed_samples`, and every
random number of (seed, sample, layer).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TrainState"]


@dataclass
class TrainState:
    """step counts steps; consumed_samples counts training sequences that were used. skipped_*: of these, the steps and samples that left
    no update in the weights, because they were skipped or undone."""

    step: int = 0
    consumed_samples: int = 0
    skipped_steps: int = 0
    skipped_samples: int = 0

    @property
    def updates(self) -> int:
        """Updates in the weights, which the learning rate and AdamW's bias correction follow."""
        return self.step - self.skipped_steps

    @property
    def useful_samples(self) -> int:
        """Samples of these updates."""
        return self.consumed_samples - self.skipped_samples
