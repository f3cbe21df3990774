"""Checkpoints of other projects, in and out: Hugging Face folders."""

from megalite.convert.hf_export import export_hf
from megalite.convert.hf_import import import_hf

__all__ = ["export_hf", "import_hf"]
