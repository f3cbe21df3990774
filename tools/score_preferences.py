"""How likely a reference model finds the chosen and the rejected answers of a file: what training by preference (DPO) compares with.

    python tools/score_preferences.py --load runs/chat --input pairs.jsonl --output scored.jsonl
    torchrun pretrain_gpt.py --dpo-data-path scored.jsonl --load runs/chat --load-weights-only ...

Every line of the input holds a prompt (text) or messages, and the texts chosen and rejected. The output has the same lines with
chosen_logp and rejected_logp, the natural logarithms of the answers' probabilities, by the chat template that training uses too. The
reference is the model that training starts from: then the loss begins at log 2 = 0.693. Prints a line of JSON; failures are one
`error:` line and exit code 1, wrong settings 2. Nothing is written unless all pairs were scored.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.errors import ConfigError, DataError, MegaliteError
from megalite.log import configure_logging

if TYPE_CHECKING:
    from megalite.grid import Grid


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="the reference: a checkpoint, a --save folder, or a Hugging Face folder")
    add("--input", required=True, metavar="FILE", help="pairs, one per line of a .jsonl file")
    add("--output", required=True, metavar="FILE", help="the same with scores; must not exist yet")
    add("--tokenizer-type", metavar="TYPE", help="bytes, chars, sentencepiece, hf or tiktoken (default: the run's)")
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file or folder (default: the run's)")
    add("--chat-template", metavar="FILE", help="in place of the tokenizer's own")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where there is one")
    add("--tp", type=int, default=1, metavar="N", help="ranks that share every layer (default: %(default)s)")
    add("--pp", type=int, default=1, metavar="N", help="ranks that share the layers among them (default: %(default)s)")
    return parser


def score(args: argparse.Namespace, device: Any = None, grid: Grid | None = None) -> dict[str, Any]:
    """Collective over the grid, whose first rank writes. Raises MegaliteError subclasses and OSError."""
    from megalite.convert import load_any
    from megalite.data.chat_encoding import ChatEncoder
    from megalite.data.preferences import read_preferences
    from megalite.evaluation.scoring import Row, Scorer
    from megalite.training.launch import choose_device

    output = Path(args.output)
    if output.exists():
        raise ConfigError(f"--output {output} exists: give another name, or delete it")
    pairs = list(read_preferences(args.input))
    stage, config = load_any(args.load, device or choose_device(args.device, 0), grid)
    kind = args.tokenizer_type or config.data.tokenizer_type
    if kind is None:
        raise ConfigError("the run does not say which tokenizer its data was made with: set --tokenizer-type")
    model = args.tokenizer_model or (config.data.tokenizer_model if args.tokenizer_type is None else None)
    encoder = ChatEncoder(kind, model, args.chat_template or config.data.chat_template)
    scorer = Scorer(stage, None if grid is None else grid.pp, batch_size=1)
    lines = []
    for pair in pairs:
        record = dict(pair.record)
        for name, answer in zip(("chosen", "rejected"), pair.answers, strict=True):
            chat = encoder.encode(answer)
            if scorer.longest is not None and len(chat.ids) > scorer.longest + 1:
                raise DataError(f"{pair.where}: the {name} answer ends after {len(chat.ids)} tokens, the model reads {scorer.longest}")
            record[f"{name}_logp"] = -scorer.total_loss([Row(chat.ids.tolist(), chat.is_answer[1:].tolist())])
        lines.append(json.dumps(record, ensure_ascii=False))
    if grid is None or grid.world.is_first:
        partial = output.with_name(f"{output.name}.tmp")
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
        partial.rename(output)
    preferred = sum(json.loads(line)["chosen_logp"] > json.loads(line)["rejected_logp"] for line in lines)
    return {"pairs": len(lines), "chosen_likelier": preferred, "output": str(output)}


def run_distributed(args: argparse.Namespace) -> None:
    from datetime import timedelta

    from megalite.grid import Grid, GridShape
    from megalite.training import Launch, guard
    from megalite.training.launch import choose_device, init_distributed

    launch = Launch.from_environment()
    with guard(launch):
        if args.tp * args.pp != launch.world_size:
            raise ConfigError(f"tp {args.tp} x pp {args.pp} is not the number of ranks, {launch.world_size}: change one of them")
        configure_logging(launch.rank, launch.world_size)
        device = choose_device(args.device, launch.local_rank)
        init_distributed(launch, device, timedelta(minutes=10))
        found = score(args, device, Grid.build(GridShape(tp=args.tp, pp=args.pp), device))
        if launch.rank == 0:
            print(json.dumps(found))


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    configure_logging(rank=0, world_size=1)
    if min(args.tp, args.pp) < 1:
        print(f"error: tp is {args.tp} and pp is {args.pp}: each must be at least 1", file=sys.stderr)
        return 2
    if args.tp * args.pp > 1:
        run_distributed(args)
        return 0
    return _said(lambda: print(json.dumps(score(args))))


def _said(action: Callable[[], None]) -> int:
    """The exit code; errors that a user can cause are one line."""
    try:
        action()
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
