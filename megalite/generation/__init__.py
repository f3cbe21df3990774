"""Generation: what a model on one rank says next."""

from megalite.generation.sample import generate

__all__ = ["generate"]
