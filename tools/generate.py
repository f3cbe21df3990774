"""Continue a text with a trained model, on one rank, whatever layout trained it.

    python tools/generate.py --load runs/shakespeare --prompt "Who's there?" --max-new-tokens 200 --temperature 0.8 --stream

Prints the prompt and what the model makes of it; without a prompt the model begins a new document. Generation ends at
the end-of-document token or after --max-new-tokens. Failures print one `error:` line and exit with 1, wrong settings
with 2.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.log import configure_logging, get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from megalite.config import RunConfig
    from megalite.data.tokenizer import Tokenizer


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="a checkpoint, or the --save folder of a run (its newest one)")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", default="", metavar="TEXT", help="text to continue (default: a new document)")
    prompt.add_argument("--prompt-file", metavar="FILE", help="read the prompt from a UTF-8 file, as it stands")
    add("--max-new-tokens", type=int, default=200, metavar="N", help="default: %(default)s")
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest token (default: %(default)s)")
    add("--top-k", type=int, default=40, metavar="K", help="draw from the K likeliest; 0: all (default: %(default)s)")
    add("--top-p", type=float, metavar="P", help="draw from the likeliest that make up this share together")
    add("--min-p", type=float, metavar="P", help="draw from those with this share of the likeliest one's probability")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="above 1: less of what occurred (default: none)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--num-samples", type=int, default=1, metavar="N", help="continuations, with seeds from --seed on (default: %(default)s)")
    add("--stream", action="store_true", help="print as it comes, for one sample")
    add("--seed", type=int, default=1, metavar="N", help="same seed, same text (default: %(default)s)")
    add("--tokenizer-type", metavar="TYPE", help="bytes, chars, sentencepiece, hf or tiktoken (default: the run's)")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file or folder (default: the run's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    return parser


def load_tokenizer(args: argparse.Namespace, config: RunConfig) -> Tokenizer:
    """The tokenizer that was asked for, else the one that the run names."""
    from megalite.data.tokenizer import build_tokenizer

    kind = args.tokenizer_type or config.data.tokenizer_type
    if kind is None:
        raise ConfigError("the run names no tokenizer: give --tokenizer-type, and --tokenizer-model unless it is bytes")
    model = args.tokenizer_model or (config.data.tokenizer_model if args.tokenizer_type is None else None)
    tokenizer = build_tokenizer(kind, model)
    if tokenizer.vocab_size > config.model.known_vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model knows {config.model.vocab_size}: "
            "give the tokenizer that it was trained with (--tokenizer-type, --tokenizer-model)"
        )
    if tokenizer.vocab_size < config.model.known_vocab_size:
        sizes = f"{tokenizer.vocab_size} ids, the model has {config.model.vocab_size}"
        get_logger().warning(f"tokenizer {tokenizer.name} has {sizes}: the text is only right if those are spare rows")
    return tokenizer


def read_prompt(args: argparse.Namespace) -> str:
    if args.prompt_file is None:
        return args.prompt
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {args.prompt_file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{args.prompt_file} is not UTF-8: {error}") from error


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The prompt's ids; a model that begins a document has just seen the end of the one before."""
    if prompt:
        return tokenizer.encode(prompt)
    if tokenizer.eod_id is None:
        raise ConfigError(f"{tokenizer.name} has no end-of-document token to begin a document after: give --prompt")
    return [tokenizer.eod_id]


def run(args: argparse.Namespace, show: Callable[[str], None]) -> None:
    """Show the prompt and each continuation. Raises MegaliteError subclasses and OSError."""
    prompt = read_prompt(args)
    if args.num_samples < 1 or (args.stream and args.num_samples > 1):
        raise ConfigError(f"num_samples is {args.num_samples}: it must be 1 or more, and 1 with --stream")
    from megalite.checkpoint.whole_model import load_model  # imports torch, so only once the prompt is there
    from megalite.generation import Sampling, TextStream, generate_batch
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
    stage, config = load_model(args.load, choose_device(args.device, 0))
    tokenizer = load_tokenizer(args, config)
    ids = prompt_ids(prompt, tokenizer)
    streams = [TextStream(tokenizer.decode, args.stop) for _ in range(args.num_samples)]
    texts = [""] * args.num_samples
    if args.stream:
        show(tokenizer.decode(ids))

    def on_token(row: int, token: int) -> bool:
        piece = streams[row].add(token)
        texts[row] += piece
        if args.stream:
            show(piece)
        return streams[row].is_stopped

    generate_batch(
        stage,
        [ids] * args.num_samples,
        sampling,
        seeds=[args.seed + number for number in range(args.num_samples)],
        stop_id=tokenizer.eod_id,
        vocab_size=tokenizer.vocab_size,
        on_token=on_token,
    )
    for text, stream in zip(texts, streams, strict=True):
        end = stream.finish()
        show(end if args.stream else tokenizer.decode(ids) + text + end)
        show("\n")


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
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
