"""The exception tree: everything a user can cause.

    MegaliteError
    ├── ConfigError       a setting is wrong, or settings contradict each other (all violations in one message)
    ├── DataError         a data file, index or tokenizer is missing, damaged or does not fit the run
    ├── ScheduleError     a pipeline schedule is incomplete, deadlocks, or breaks an order that the numbers rely on
    ├── CheckpointError   a checkpoint is missing, damaged, or holds other tensors than the model
    ├── NumericsError     numbers went wrong in training: a loss or gradient that is not finite, an overflow, weights that drifted apart
    └── CommError         a collective failed or timed out; names the axis, the ranks and what the run was doing

Each message names the numbers and the remedy. Our own mistakes are `assert`s.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["CheckpointError", "CommError", "ConfigError", "DataError", "MegaliteError", "NumericsError", "ScheduleError"]


class MegaliteError(Exception):
    """Base of all errors that a user can cause and repair."""


class ConfigError(MegaliteError):
    """One or more settings are wrong.

    `violations` holds one sentence each; the message lists them all, so that a user repairs a configuration in one go.
    """

    def __init__(self, violations: str | Sequence[str]) -> None:
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        if len(self.violations) == 1:
            message = self.violations[0]
        else:
            lines = "\n".join(f"  {number}. {text}" for number, text in enumerate(self.violations, 1))
            message = f"{len(self.violations)} settings are wrong:\n{lines}"
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.violations,)


class DataError(MegaliteError):
    """A data file, index or tokenizer is missing, damaged, or does not fit the run."""


class ScheduleError(MegaliteError):
    """A pipeline schedule cannot run, or would not give the numbers that every other schedule gives."""


class CheckpointError(MegaliteError):
    """A checkpoint is missing, damaged, or does not fit the model."""


class NumericsError(MegaliteError):
    """Numbers of the training went wrong; the message says at which step, and that the weights are still the good ones."""


class CommError(MegaliteError):
    """A collective or transfer failed; the message names the axis, the ranks and what the run was doing."""
