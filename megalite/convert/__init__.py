"""Checkpoints of other projects, in and out: Hugging Face folders, Megatron checkpoints, GGUF files, adapters of PEFT."""

from megalite.convert.base import is_hf_folder
from megalite.convert.gguf_import import import_gguf
from megalite.convert.hf_export import export_hf
from megalite.convert.hf_import import import_hf
from megalite.convert.load import load_any
from megalite.convert.megatron_export import export_megatron
from megalite.convert.megatron_import import import_megatron, model_from_file
from megalite.convert.peft_export import export_peft
from megalite.convert.peft_import import import_peft

__all__ = [
    "export_hf",
    "export_megatron",
    "export_peft",
    "import_gguf",
    "import_hf",
    "import_megatron",
    "import_peft",
    "is_hf_folder",
    "load_any",
    "model_from_file",
]
