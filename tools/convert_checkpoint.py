"""Convert checkpoints: from a Hugging Face folder to megalite, and back.

    python tools/convert_checkpoint.py --from hf --to megalite --input Llama-3.2-1B --output runs/llama
    python tools/convert_checkpoint.py --from megalite --to hf --input runs/llama --output Llama-converted

The first writes a folder that any layout loads:
    torchrun --nproc-per-node 4 pretrain_gpt.py --config runs/llama/config.toml --load runs/llama --load-weights-only --tp 2 --pp 2 ...
The second takes the newest checkpoint of a --save folder, whatever layout wrote it; the result loads with `from_pretrained`.

Families: GPT-2, Llama 2 and 3, Mistral, Qwen2, Qwen3 (dense). Anything in a configuration that is not known is an error. Optimizer state
is not converted. Memory: a few times the largest tensor. Exit code 2 for a model or folder that cannot be converted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.errors import MegaliteError


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", choices=("hf", "megalite"), required=True, help="format of --input")
    parser.add_argument("--to", dest="target", choices=("hf", "megalite"), required=True, help="format of --output")
    parser.add_argument("--input", type=Path, required=True, help="folder to read")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; it must not hold anything of the kind yet")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="number format of exported weights")
    parser.add_argument("--max-shard-gb", type=float, default=5.0, help="largest exported file in GB (default 5)")
    options = parser.parse_args(arguments)
    if options.source == options.target:
        parser.error(f"--from and --to are both {options.source}")
    if options.max_shard_gb <= 0:
        parser.error("--max-shard-gb must be above 0")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    from megalite.convert import export_hf, import_hf

    begin = time.perf_counter()
    try:
        if options.source == "hf":
            path = import_hf(options.input, options.output)
        else:
            path = export_hf(options.input, options.output, dtype=options.dtype, max_shard_bytes=round(options.max_shard_gb * 10**9))
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {path} in {time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
