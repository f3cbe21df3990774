r"""Turn a text corpus into token files for training.

    python tools/preprocess_data.py --input corpus/*.jsonl.gz --output-prefix data/corpus \
        --tokenizer-type hf --tokenizer-model gpt2/ --append-eod

Writes PREFIX_text_document.bin and .idx, and a .meta.json with the tokenizer's facts. Progress goes to standard
error; the last line of standard output is the result as JSON. Failures print one `error:` line, leave no output and
exit with 1 (2 for unknown options).
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time

from megalite.data.preprocess import Counts, PreprocessOptions, Summary, default_workers, preprocess
from megalite.data.tokenizer import SPECIAL_TOKEN_MODES, TokenizerSpec
from megalite.errors import MegaliteError
from megalite.log import configure_logging

_SECONDS_BETWEEN_LINES = 5.0


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help=".jsonl/.json (a record per line), .txt; also .gz, .zst; globs; - is stdin",
    )
    add("--output-prefix", required=True, metavar="P", help="writes P_KEY_document.{bin,idx,meta.json} for each key")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take from each record (default: text)")
    add(
        "--tokenizer-type",
        required=True,
        metavar="TYPE",
        help="bytes, chars, sentencepiece or hf; Megatron's names are understood",
    )
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file, or folder with tokenizer.json")
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add("--prepend-bos", action="store_true", help="start each document with the beginning-of-sequence id")
    add("--eod-token", metavar="TOKEN", help="the end-of-document token, where the tokenizer's files leave it open")
    add(
        "--special-tokens-in-text",
        choices=SPECIAL_TOKEN_MODES,
        default="plain",
        help="a control token's spelling in a text: plain text (default), the control token, or plain text and counted",
    )
    add(
        "--document-separator",
        metavar="TEXT",
        help=r"cut .txt files into documents here; \n \t \r \f \\ are understood (default: each file is one document)",
    )
    add("--skip-invalid", action="store_true", help="skip and count invalid records instead of failing at the first")
    add(
        "--workers",
        type=int,
        default=default_workers(),
        help="processes that encode; 1 encodes in this one (default: %(default)s)",
    )
    add(
        "--chunk-bytes",
        type=int,
        default=1 << 20,
        help="text sent to a worker at a time; memory grows with it (default: %(default)s)",
    )
    return parser


def options_from(args: argparse.Namespace) -> PreprocessOptions:
    """The library's settings for parsed arguments."""
    return PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer=TokenizerSpec(args.tokenizer_type, args.tokenizer_model, args.special_tokens_in_text, args.eod_token),
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        prepend_bos=args.prepend_bos,
        skip_invalid=args.skip_invalid,
        document_separator=args.document_separator,
        workers=args.workers,
        chunk_bytes=args.chunk_bytes,
    )


class Progress:
    """Shows counts on standard error: one live line on a terminal, otherwise a plain line every few seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._last = self._start
        self._status = None
        if sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("reading ...")

    def __enter__(self) -> Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def __call__(self, counts: Counts) -> None:
        now = time.perf_counter()
        if self._status is not None:
            self._status.update(describe(counts, now - self._start))
        elif now - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = now
            print(describe(counts, now - self._start), file=sys.stderr)


def describe(counts: Counts, seconds: float) -> str:
    """One line about a run."""
    parts = [f"{counts.documents:,} documents", f"{counts.tokens:,} tokens", f"{counts.num_bytes / 1e6:,.1f} MB"]
    parts.append(f"{counts.tokens / max(seconds, 1e-9):,.0f} tokens/s")
    if counts.empty:
        parts.append(f"{counts.empty:,} empty")
    if counts.skipped:
        parts.append(f"{counts.skipped:,} invalid records skipped")
    return ", ".join(parts)


def print_summary(options: PreprocessOptions, summary: Summary) -> None:
    """What was done, for people on standard error and for programs on standard output."""
    counts = summary.counts
    print(f"{describe(counts, summary.seconds)}, {summary.seconds:.1f} s", file=sys.stderr)
    added = [f"EOD {summary.eod_id} appended" if options.append_eod else "no EOD appended"]
    added.append(f"BOS {summary.bos_id} prepended" if options.prepend_bos else "no BOS prepended")
    print(
        f"{summary.dtype} ids, vocabulary {summary.vocab_size}, {', '.join(added)}: {', '.join(summary.outputs)}",
        file=sys.stderr,
    )
    if counts.problem:
        print(f"first skipped record: {counts.problem}", file=sys.stderr)
    mode = options.tokenizer.special_tokens_in_text
    if mode != "plain":
        meaning = "kept as plain text" if mode == "count" else "read as control tokens"
        print(f"{counts.special_strings:,} spellings of control tokens in the texts, {meaning}", file=sys.stderr)
    result = {
        "documents": counts.documents,
        "empty": counts.empty,
        "sequences": counts.sequences,
        "tokens": counts.tokens,
        "skipped": counts.skipped,
        "special_strings": None if mode == "plain" else counts.special_strings,
        "seconds": round(summary.seconds, 3),
        "tokens_per_s": round(counts.tokens / max(summary.seconds, 1e-9), 1),
        "dtype": summary.dtype,
        "vocab_size": summary.vocab_size,
        "eod_id": summary.eod_id,
        "bos_id": summary.bos_id,
        "outputs": summary.outputs,
    }
    print(json.dumps(result))


def _stop(signal_number: int, _frame: object) -> None:
    sys.exit(128 + signal_number)  # an exception, so that the output under way is removed


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    options = options_from(build_parser().parse_args(arguments))
    configure_logging(rank=0, world_size=1)
    signal.signal(signal.SIGTERM, _stop)
    try:
        with Progress() as progress:
            summary = preprocess(options, report=progress)
    except (MegaliteError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("error: interrupted, no output was kept", file=sys.stderr)
        return 130
    print_summary(options, summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
