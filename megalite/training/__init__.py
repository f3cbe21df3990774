"""Training: the only place that knows everything."""

from megalite.training.launch import Launch, guard
from megalite.training.program import run_training

__all__ = ["Launch", "guard", "run_training"]
