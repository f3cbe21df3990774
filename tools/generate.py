"""Continue texts with a trained model, whatever layout trained it, or with a Hugging Face folder as it is.

    python tools/generate.py --load runs/shakespeare --prompt "Who's there?" --max-new-tokens 200 --temperature 0.8 --stream
    python tools/generate.py --load SmolLM2-135M --prompt "The capital of France is" --prompt "Two and two are" --temperature 0
    torchrun --nproc-per-node 4 tools/generate.py --tp 2 --pp 2 --load runs/llama --prompt "Once upon a time"

Prints every prompt and what the model makes of it; without a prompt the model begins a new document. Generation ends at
the end-of-document token, before a --stop text, or after --max-new-tokens. Several prompts and samples are computed as one
batch, and each of them is what it would be alone. Failures print one `error:` line and exit with 1, wrong settings with 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.log import configure_logging

if TYPE_CHECKING:
    from megalite.grid import Grid


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="a checkpoint, the --save folder of a run (its newest one), or a Hugging Face folder")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="text to continue; may be given several times")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file, as it stands")
    add("--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default: %(default)s)")
    add("--top-k", type=int, default=40, metavar="K", help="draw from the K likeliest; 0: all (default: %(default)s)")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest that make up this share together")
    add("--min-p", type=float, metavar="P", help="draw from those with this share of the likeliest one's probability")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: less of what occurred (default: none)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--num-samples", type=int, default=1, metavar="N", help="of each prompt, with seeds from --seed on (default: %(default)s)")
    add("--stream", action="store_true", help="print as it comes, for one prompt and sample")
    add("--seed", type=int, default=1, metavar="N", help="same seed, same text (default: %(default)s)")
    add("--tokenizer-type", metavar="TYPE", help="bytes, chars, sentencepiece, hf or tiktoken (default: the run's)")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file or folder (default: the run's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights: bf16 halves memory and time (default: %(default)s)")
    add("--int8-cache", action="store_true", help="keep keys and values as 8-bit integers: a quarter of the memory, and rounded")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share every layer (default: %(default)s)")
    add("--pp", type=int, default=1, metavar="N", help="ranks that share the layers among them (default: %(default)s)")
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    if args.prompt_file is None:
        return args.prompt or [""]
    try:
        return [Path(args.prompt_file).read_text(encoding="utf-8")]
    except OSError as error:
        raise DataError(f"cannot read {args.prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{args.prompt_file} is not UTF-8: {error}") from error


def run(args: argparse.Namespace, show: Callable[[str], None], device: Any = None, grid: Grid | None = None) -> None:
    """Show the prompts and their continuations. Raises MegaliteError subclasses and OSError."""
    prompts, samples = read_prompts(args), args.num_samples
    if samples < 1 or (args.stream and samples * len(prompts) > 1):
        raise ConfigError(f"num_samples is {samples} of {len(prompts)} prompts: there must be 1 or more, and 1 in all with --stream")
    import torch  # only once the prompt is there

    from megalite.convert import load_any
    from megalite.generation import Sampling, TextStream, generate_batch, load_tokenizer, prompt_ids
    from megalite.training.launch import choose_device

    sampling = Sampling(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k or None,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
    )
    stage, config = load_any(args.load, device or choose_device(args.device, 0), grid)
    if args.dtype == "bf16":
        stage = stage.to(torch.bfloat16)
    tokenizer = load_tokenizer(config, args.tokenizer_type, args.tokenizer_model)
    ids = [prompt_ids(prompt, tokenizer) for prompt in prompts for _ in range(samples)]
    streams, texts = [TextStream(tokenizer.decode, args.stop) for _ in ids], [""] * len(ids)
    if args.stream:
        show(tokenizer.decode(ids[0]))

    def on_token(row: int, token: int) -> bool:
        piece = streams[row].add(token)
        texts[row] += piece
        if args.stream:
            show(piece)
        return streams[row].is_stopped

    generate_batch(
        stage,
        ids,
        sampling,
        seeds=[args.seed + number for _ in prompts for number in range(samples)],
        stop_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
        on_token=on_token,
        pp=None if grid is None else grid.pp,
        int8_cache=args.int8_cache,
    )
    for row, text, stream in zip(ids, texts, streams, strict=True):
        end = stream.finish()
        show(end if args.stream else tokenizer.decode(row) + text + end)
        show("\n")


def run_ranks(args: argparse.Namespace) -> None:
    """`run` as one of tp x pp ranks, of which the first one prints. Ends the process on errors."""
    from datetime import timedelta

    from megalite.grid import Grid, GridShape
    from megalite.training.launch import Launch, choose_device, guard, init_distributed

    launch = Launch.from_environment()
    with guard(launch):
        if launch.world_size != args.tp * args.pp:
            ranks = f"tp {args.tp} x pp {args.pp} needs {args.tp * args.pp} ranks, {launch.world_size} were launched"
            raise ConfigError(f"{ranks}: torchrun --nproc-per-node {args.tp * args.pp} tools/generate.py ...")
        configure_logging(launch.rank, launch.world_size)
        device = choose_device(args.device, launch.local_rank)
        init_distributed(launch, device, timedelta(minutes=10))
        grid = Grid.build(GridShape(tp=args.tp, pp=args.pp), device)
        run(args, _show if launch.rank == 0 else lambda text: None, device, grid)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    if args.tp < 1 or args.pp < 1:
        print(f"error: tp is {args.tp} and pp is {args.pp}: each must be at least 1", file=sys.stderr)
        return 2
    if args.tp * args.pp > 1:
        run_ranks(args)
        return 0
    configure_logging(rank=0, world_size=1)
    try:
        run(args, _show)
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _show(text: str) -> None:
    print(text, end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
