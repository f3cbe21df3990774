"""What a model is worth: losses of texts, and likelihoods of continuations. The adapter to a harness is imported by its module name."""

from megalite.evaluation.perplexity import Perplexity, TokenStream, measure
from megalite.evaluation.scoring import Scorer

__all__ = ["Perplexity", "Scorer", "TokenStream", "measure"]
