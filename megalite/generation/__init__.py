"""Generation: what a model says next."""

from megalite.generation.choice import Sampling
from megalite.generation.sample import generate, generate_batch
from megalite.generation.text import TextStream, load_tokenizer, prompt_ids

__all__ = ["Sampling", "TextStream", "generate", "generate_batch", "load_tokenizer", "prompt_ids"]
