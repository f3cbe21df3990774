"""The model: GPT and Llama style decoders, cut into pipeline stages and over tp."""

from megalite.model.gpt import GPTStage, build_stage
from megalite.model.materialize import materialize

__all__ = ["GPTStage", "build_stage", "materialize"]
