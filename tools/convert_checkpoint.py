"""Convert checkpoints: Hugging Face, Megatron or GGUF to megalite, megalite to Hugging Face or Megatron, and adapters (LoRA) of PEFT.

    python tools/convert_checkpoint.py --from hf --to megalite --input Llama-3.2-1B --output runs/llama
    python tools/convert_checkpoint.py --from megatron --to megalite --input checkpoints --vocab-size 50257 --output runs/gpt
    python tools/convert_checkpoint.py --from gguf --to megalite --input SmolLM2-135M.gguf --output runs/smollm
    python tools/convert_checkpoint.py --from megalite --to hf --input runs/llama --output Llama-converted
    python tools/convert_checkpoint.py --from peft --to megalite --input my-lora --base runs/llama --output runs/lora
    python tools/convert_checkpoint.py --from megalite --to peft --input runs/lora --base meta-llama/Llama-3.2-1B --output my-lora

What becomes megalite is a folder that any layout loads:
    torchrun --nproc-per-node 4 pretrain_gpt.py --config runs/llama/config.toml --load runs/llama --load-weights-only --tp 2 --pp 2 ...
What comes from megalite is the newest checkpoint of a --save folder, whatever layout wrote it. A Hugging Face folder loads with
`from_pretrained`; a Megatron one is torch_dist, which Megatron loads at any layout of its own (--load DIR --ckpt-format torch_dist).

Adapters of PEFT become a checkpoint of the adapters alone, beside --base (a folder of Hugging Face or of megalite; to train on, one of
megalite):
    pretrain_gpt.py --config runs/lora/config.toml --load runs/lora --load-weights-only ...
To hf and megatron, such a checkpoint is merged into its base: the one that its run was given, or --base.

Families: GPT-2, Llama 2 and 3, Mistral, Qwen2, Qwen3 (dense). Megatron's torch_dist and its older files per rank are read. A checkpoint
of Megatron knows its settings but not the true vocabulary (--vocab-size); --model-config gives both in place of what is stored.
Anything in a configuration that is not known is an error. Optimizer state is not converted. Memory: a few times the largest tensor.
Exit code 2 for a model or folder that cannot be converted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.errors import MegaliteError

SOURCES, TARGETS = ("hf", "megatron", "gguf", "peft"), ("hf", "megatron", "peft")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--from", dest="source", choices=(*SOURCES, "megalite"), required=True, help="format of --input")
    add("--to", dest="target", choices=(*TARGETS, "megalite"), required=True, help="format of --output")
    add("--input", type=Path, required=True, help="folder (for gguf: file) to read")
    add("--output", type=Path, required=True, help="folder to write; it must not hold anything of the kind yet")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format of exported weights")
    add("--max-shard-gb", type=float, default=5.0, help="largest exported file of Hugging Face's format, in GB (default 5)")
    add("--base", metavar="DIR", help="of adapters: their model; to peft: the name of it that is written (default: the run's)")
    add("--vocab-size", type=int, metavar="V", help="from megatron: the tokenizer's true number of tokens")
    add(
        "--model-config",
        type=Path,
        metavar="FILE",
        help="from megatron: what the model is (config.json, config.toml or their folder)",
    )
    options = parser.parse_args(arguments)
    if (options.source == "megalite") == (options.target == "megalite"):
        parser.error(f"--from {options.source} --to {options.target}: one of them must be megalite, and not both")
    if options.max_shard_gb <= 0:
        parser.error("--max-shard-gb must be above 0")
    if options.source != "megatron" and (options.vocab_size or options.model_config):
        parser.error("--vocab-size and --model-config are for --from megatron: other formats say it themselves")
    if options.source == "peft" and options.base is None:
        parser.error("--from peft needs --base, the folder of the model that the adapters belong to")
    if options.source not in ("peft", "megalite") and options.base is not None:
        parser.error("--base is for adapters, --from peft or megalite")
    return options


def convert(options: argparse.Namespace) -> Path:
    """Raises MegaliteError subclasses."""
    from megalite.convert import (
        export_hf,
        export_megatron,
        export_peft,
        import_gguf,
        import_hf,
        import_megatron,
        import_peft,
        model_from_file,
    )

    if options.source == "hf":
        return import_hf(options.input, options.output)
    if options.source == "gguf":
        return import_gguf(options.input, options.output)
    if options.source == "megatron":
        model = None if options.model_config is None else model_from_file(options.model_config)
        return import_megatron(options.input, options.output, model=model, vocab_size=options.vocab_size)
    if options.source == "peft":
        return import_peft(options.input, options.output, Path(options.base))
    if options.target == "peft":
        return export_peft(options.input, options.output, base=options.base, dtype=options.dtype)
    base = None if options.base is None else Path(options.base)
    if options.target == "hf":
        most = round(options.max_shard_gb * 10**9)
        return export_hf(options.input, options.output, base=base, dtype=options.dtype, max_shard_bytes=most)
    return export_megatron(options.input, options.output, base=base, dtype=options.dtype)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    begin = time.perf_counter()
    try:
        path = convert(options)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path} in {time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
