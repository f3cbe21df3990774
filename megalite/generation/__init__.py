"""Generation: what a model on one rank says next."""

from megalite.generation.choice import Sampling
from megalite.generation.sample import generate, generate_batch
from megalite.generation.text import TextStream

__all__ = ["Sampling", "TextStream", "generate", "generate_batch"]
