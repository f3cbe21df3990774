"""megalite: GPT and Llama style language models, trained over tensor, pipeline and data axes at once.

This file imports nothing, so that the parts without torch (configuration, schedules, data preparation) start at once.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
