"""Perplexity of a text, a data set or the answers of conversations, under any checkpoint or Hugging Face folder.

    python tools/evaluate.py --load runs/shakespeare --text hamlet.txt
    python tools/evaluate.py --load SmolLM2-135M --data-path data/valid_text_document --context 512 --stride 256
    python tools/evaluate.py --load runs/chat --chat valid.jsonl
    torchrun --nproc-per-node 4 tools/evaluate.py --tp 2 --pp 2 --load runs/llama --text hamlet.txt
    python tools/evaluate.py --load SmolLM2-135M --tasks lambada_openai --limit 100

Every token is predicted exactly once, and the mean is over tokens, whatever windows they are in. A text is predicted from a token that
begins documents, if the tokenizer has one; a .jsonl file holds a document per line ("text"), each by itself. Documents of --data-path lie
end to end, as in training, unless --per-document. --tasks are those of lm-evaluation-harness (pip install 'megalite[lm-eval]').

Prints a table, then the same numbers as one line of JSON. Failures print one `error:` line and exit with 1, wrong settings with 2.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError, MegaliteError
from megalite.log import configure_logging

if TYPE_CHECKING:
    from megalite.config import RunConfig
    from megalite.data.tokenizer import Tokenizer
    from megalite.evaluation import Perplexity, Scorer, TokenStream
    from megalite.grid import Grid

_MOST_CONTEXT = 2048


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="a checkpoint, the --save folder of a run (its newest one), or a Hugging Face folder")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", nargs="+", metavar="FILE", help=".txt (a document) or .jsonl (one per line), also .gz and .zst")
    what.add_argument("--data-path", metavar="PREFIX", help="a .bin/.idx pair of tools/preprocess_data.py or Megatron")
    what.add_argument("--chat", metavar="FILE", help="conversations (.jsonl): the loss of their answers")
    what.add_argument("--tasks", metavar="NAMES", help="tasks of lm-evaluation-harness or its .yaml files, between commas")
    add("--json-key", default="text", metavar="KEY", help="of the text in .jsonl files (default: %(default)s)")
    add("--per-document", action="store_true", help="with --data-path: documents by themselves instead of end to end")
    add(
        "--context",
        type=int,
        metavar="N",
        help=f"tokens that are read at once (default: the run's sequence length, at most {_MOST_CONTEXT})",
    )
    add("--stride", type=int, metavar="N", help="new tokens of every window; below --context windows overlap (default: --context)")
    add("--first-token", choices=("auto", "bos", "eod", "none"), default="auto", help="what the first token is predicted from; none: it is "
        "read and not counted (default: bos where the tokenizer has one, else eod, else none)")  # fmt: skip
    add("--chat-template", metavar="FILE", help="with --chat: in place of the tokenizer's own")
    add("--limit", type=int, metavar="N", help="with --tasks: examples of each")
    add("--num-fewshot", type=int, metavar="N", help="with --tasks: worked examples in every prompt (default: the task's)")
    add("--add-bos", action="store_true", help="with --tasks: begin every prompt with the tokenizer's bos")
    add("--batch-size", type=int, default=8, metavar="N", help="windows that are computed together (default: %(default)s)")
    add("--tokenizer-type", metavar="TYPE", help="bytes, chars, sentencepiece, hf or tiktoken (default: the run's)")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file or folder (default: the run's)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    add("--dtype", choices=("fp32", "bf16"), default="fp32", help="of weights (default: %(default)s)")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share every layer (default: %(default)s)")
    add("--pp", type=int, default=1, metavar="N", help="ranks that share the layers among them (default: %(default)s)")
    return parser


def evaluate(args: argparse.Namespace, device: Any = None, grid: Grid | None = None) -> dict[str, Any]:
    """The figures. Collective over the grid. Raises MegaliteError subclasses and OSError."""
    if args.tasks is not None and find_spec("lm_eval") is None:
        raise ConfigError("--tasks needs lm-evaluation-harness, which is not installed: pip install 'megalite[lm-eval]'")
    import torch

    from megalite.convert import load_any
    from megalite.evaluation import Scorer, measure
    from megalite.training.launch import choose_device

    stage, config = load_any(args.load, device or choose_device(args.device, 0), grid)
    if args.dtype == "bf16":
        stage = stage.to(torch.bfloat16)
    scorer = Scorer(stage, None if grid is None else grid.pp, batch_size=args.batch_size)
    if args.tasks is not None:
        return run_tasks(args, scorer, stage, config)
    lengths = [length for length in (config.data.seq_length, scorer.longest, _MOST_CONTEXT) if length is not None]
    context = min(lengths) if args.context is None else args.context
    stride = context if args.stride is None else args.stride
    start = time.perf_counter()
    found = measure(scorer, read_streams(args, config), context=context, stride=stride)
    return figures(found) | {"context": context, "stride": stride, "seconds": round(time.perf_counter() - start, 3)}


def figures(found: Perplexity) -> dict[str, Any]:
    return {
        "perplexity": found.perplexity,
        "loss": found.loss,
        "bits_per_byte": found.bits_per_byte,
        "tokens": found.num_tokens,
        "bytes": found.num_bytes,
        "windows": found.num_windows,
    }


def read_streams(args: argparse.Namespace, config: RunConfig) -> list[TokenStream]:
    """What the model is to predict."""
    from megalite.generation import load_tokenizer

    if args.chat is not None:
        return _chat_streams(args, config)
    if args.text is not None:
        tokenizer = load_tokenizer(config, args.tokenizer_type, args.tokenizer_model)
        return _text_streams(args, tokenizer)
    named = args.tokenizer_type or config.data.tokenizer_type
    return _data_streams(args, load_tokenizer(config, args.tokenizer_type, args.tokenizer_model) if named else None)


def _text_streams(args: argparse.Namespace, tokenizer: Tokenizer) -> list[TokenStream]:
    import numpy as np

    from megalite.data.documents import find_sources, read_chunks
    from megalite.data.encoding import parse_record
    from megalite.errors import DataError
    from megalite.evaluation import TokenStream

    streams, first = [], _first_token(args.first_token, tokenizer.bos_id, tokenizer.eod_id)
    for chunk in read_chunks(find_sources(args.text), None, 1 << 20, None):
        for index, raw in enumerate(chunk.records):
            if chunk.is_json_lines and not raw.strip():
                continue
            try:
                (texts,) = parse_record(raw, chunk.is_json_lines, [args.json_key])
                for text in texts:
                    ids = np.array(tokenizer.encode(text), dtype=np.int32)
                    streams.append(TokenStream([ids], first, num_bytes=len(text.encode("utf-8"))))
            except DataError as error:
                raise DataError(f"{chunk.where(index)}: {error}") from None
    return streams


def _data_streams(args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[TokenStream]:
    from megalite.data import IndexedDataset
    from megalite.data.dataset_meta import read_meta
    from megalite.data.tokenizer import find_losses
    from megalite.evaluation import TokenStream

    data, meta = IndexedDataset(args.data_path), read_meta(args.data_path)
    source = tokenizer if meta is None else meta
    first = _first_token(args.first_token, None if source is None else source.bos_id, None if source is None else source.eod_id)
    parts = [part for part in data if len(part)]
    if args.per_document and first is not None:  # documents that begin with it need no second one
        parts = [part[1:] if part[0] == first else part for part in parts]
    # only a tokenizer that loses nothing, and that made the data, can say how long the text was
    is_same = tokenizer is not None and (meta is None or meta.vocab_size == tokenizer.vocab_size)
    sizes: list[int | None] = [None] * len(parts)
    if tokenizer is not None and is_same and not find_losses(tokenizer):
        sizes = [len(tokenizer.decode(part.tolist()).encode("utf-8")) for part in parts]
    if args.per_document:
        return [TokenStream([part], first, num_bytes=size) for part, size in zip(parts, sizes, strict=True)]
    return [TokenStream(parts, first, num_bytes=None if None in sizes else sum(size or 0 for size in sizes))]


def _chat_streams(args: argparse.Namespace, config: RunConfig) -> list[TokenStream]:
    from megalite.data.chat import read_chat
    from megalite.data.chat_encoding import ChatEncoder
    from megalite.evaluation import TokenStream

    kind, model = args.tokenizer_type or config.data.tokenizer_type, args.tokenizer_model
    if kind is None:
        raise ConfigError("the run names no tokenizer: give --tokenizer-type, and --tokenizer-model unless it is bytes")
    if args.tokenizer_type is None:
        model = model or config.data.tokenizer_model
    encoder = ChatEncoder(kind, model, args.chat_template or config.data.chat_template)
    encoded = [encoder.encode(chat) for chat in read_chat(args.chat)]
    # nothing comes before a template's own beginning, so its first token is only read
    return [TokenStream([chat.ids], None, is_counted=chat.is_answer) for chat in encoded]


def _first_token(choice: str, bos: int | None, eod: int | None) -> int | None:
    token = {"auto": eod if bos is None else bos, "bos": bos, "eod": eod, "none": None}[choice]
    if token is None and choice in ("bos", "eod"):
        raise ConfigError(f"the tokenizer has no {choice} token: choose another --first-token")
    return token


def run_tasks(args: argparse.Namespace, scorer: Scorer, stage: Any, config: RunConfig) -> dict[str, Any]:
    """Results of lm-evaluation-harness by task."""
    from megalite.evaluation.lm_eval import MegaliteLM, run_tasks
    from megalite.generation import load_tokenizer

    tokenizer = load_tokenizer(config, args.tokenizer_type, args.tokenizer_model)
    model = MegaliteLM(stage, tokenizer, scorer, add_bos=args.add_bos)
    return {"tasks": run_tasks(model, args.tasks.split(","), limit=args.limit, num_fewshot=args.num_fewshot)}


def show(found: dict[str, Any]) -> None:
    """A table, and the line of JSON."""
    rows = found["tasks"].items() if "tasks" in found else [("", found)]
    for name, values in rows:
        if name:
            print(name)
        for key, value in values.items():
            text = (
                "not known"
                if value is None
                else f"{value:,.6g}"
                if isinstance(value, float)
                else f"{value:,}"
                if isinstance(value, int)
                else value
            )
            print(f"{key.replace('_', ' '):>24}  {text}")
    print(json.dumps(found))


def run_ranks(args: argparse.Namespace) -> None:
    """`evaluate` as one of tp x pp ranks, of which the first one prints. Ends the process on errors."""
    from datetime import timedelta

    from megalite.grid import Grid, GridShape
    from megalite.training.launch import Launch, choose_device, guard, init_distributed

    launch = Launch.from_environment()
    with guard(launch):
        if launch.world_size != args.tp * args.pp:
            ranks = f"tp {args.tp} x pp {args.pp} needs {args.tp * args.pp} ranks, {launch.world_size} were launched"
            raise ConfigError(f"{ranks}: torchrun --nproc-per-node {args.tp * args.pp} tools/evaluate.py ...")
        configure_logging(launch.rank, launch.world_size)
        device = choose_device(args.device, launch.local_rank)
        init_distributed(launch, device, timedelta(minutes=10))
        found = evaluate(args, device, Grid.build(GridShape(tp=args.tp, pp=args.pp), device))
        if launch.rank == 0:
            show(found)


def main(arguments: list[str] | None = None, show: Callable[[dict[str, Any]], None] = show) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    if min(args.tp, args.pp) < 1:
        print(f"error: tp is {args.tp} and pp is {args.pp}: each must be at least 1", file=sys.stderr)
        return 2
    if args.tp * args.pp > 1:
        run_ranks(args)
        return 0
    configure_logging(rank=0, world_size=1)
    try:
        show(evaluate(args))
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
