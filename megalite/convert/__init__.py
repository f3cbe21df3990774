"""Checkpoints of other projects, in and out: Hugging Face folders, Megatron checkpoints, GGUF files."""

from megalite.convert.gguf_import import import_gguf
from megalite.convert.hf_export import export_hf
from megalite.convert.hf_import import import_hf
from megalite.convert.load import is_hf_folder, load_any
from megalite.convert.megatron_export import export_megatron
from megalite.convert.megatron_import import import_megatron, model_from_file

__all__ = ["export_hf", "export_megatron", "import_gguf", "import_hf", "import_megatron", "is_hf_folder", "load_any", "model_from_file"]
