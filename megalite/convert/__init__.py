"""Checkpoints of other projects, in and out: Hugging Face folders."""

from megalite.convert.hf_export import export_hf
from megalite.convert.hf_import import import_hf
from megalite.convert.load import is_hf_folder, load_any

__all__ = ["export_hf", "import_hf", "is_hf_folder", "load_any"]
