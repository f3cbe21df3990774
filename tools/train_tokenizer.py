"""Train a tokenizer on text files.

    python tools/train_tokenizer.py --input examples/data/shakespeare.txt --output-prefix out/tokenizer --vocab-size 512

Writes PREFIX.model (SentencePiece: bpe or unigram; decoding gives back every text) or PREFIX.json (chars: the list of
characters). The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from megalite.data.tokenizer_training import MODEL_TYPES, read_texts, train_characters, train_sentencepiece
from megalite.errors import ConfigError, MegaliteError


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="text or JSON-lines files (.txt .jsonl .json, also .gz .zst), globs",
    )
    add("--output-prefix", required=True, metavar="P", help="writes P.model or P.json")
    add("--model-type", choices=MODEL_TYPES, default="bpe", help="default: bpe")
    add(
        "--vocab-size",
        type=int,
        metavar="N",
        help="number of pieces; needed for bpe and unigram, and not used for chars",
    )
    add("--json-key", default="text", metavar="KEY", help="key to take from JSON lines (default: text)")
    return parser


def train(args: argparse.Namespace) -> tuple[Path, int]:
    """Train as asked; returns the file written and its vocabulary size."""
    texts = read_texts(args.input, args.json_key)
    if args.model_type == "chars":
        if args.vocab_size is not None:
            raise ConfigError("the size of a chars vocabulary follows from the text; leave --vocab-size away")
        path = Path(f"{args.output_prefix}.json")
        return path, train_characters(texts, path)
    if args.vocab_size is None:
        raise ConfigError(f"a {args.model_type} model needs --vocab-size")
    path = Path(f"{args.output_prefix}.model")
    return path, train_sentencepiece(texts, path, args.vocab_size, args.model_type)


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    try:
        path, vocab_size = train(args)
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    print(json.dumps({"model": str(path), "model_type": args.model_type, "vocab_size": vocab_size}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
