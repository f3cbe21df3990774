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
from megalite.data.tokenizer import BACKENDS, SPECIAL_TOKEN_MODES, TOKENIZER_TYPES, TokenizerSpec
from megalite.errors import ConfigError, MegaliteError
from megalite.log import configure_logging

_SECONDS_BETWEEN_LINES = 30.0
_PARTITIONS = "give all files with --input; --workers shares them out, and the order of documents stays that of the input"
_SENTENCES = "documents are not cut into sentences; a list of texts under a key gives one sequence for each of them"
_WORKERS = "one worker for each processor is the default"
_NOT_NEEDED = {
    **dict.fromkeys(("--partitions", "--keep-sequential-samples"), _PARTITIONS),
    **dict.fromkeys(("--split-sentences", "--keep-newlines", "--lang"), _SENTENCES),
    **dict.fromkeys(("--find-optimal-num-workers", "--workers-to-check", "--max-documents"), _WORKERS),
    "--log-interval": "progress is shown on a terminal, and every 30 seconds elsewhere",
}


def build_parser() -> argparse.ArgumentParser:
    """All options; unknown and abbreviated ones are errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    files = ".jsonl/.json (a record per line), .txt; also .gz, .zst; globs; - is stdin (JSON lines)"
    add("--input", nargs="+", required=True, metavar="FILE", help=files)
    add("--output-prefix", required=True, metavar="P", help="writes P_KEY_document.{bin,idx,meta.json} for each key")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take from each record (default: text)")
    add("--append-eod", action="store_true", help="end each document with the end-of-document id")
    add("--prepend-bos", action="store_true", help="start each document with the beginning-of-sequence id")
    separator = r"cut .txt files into documents here; \n \t \r \f \\ are understood (default: each file is one document)"
    add("--document-separator", metavar="TEXT", help=separator)
    add("--skip-invalid", action="store_true", help="skip and count invalid records instead of failing at the first")
    workers = "processes that encode; 1 encodes in this one (default: one for each processor, here %(default)s)"
    add("--workers", type=int, default=default_workers(), help=workers)
    chunk = "text sent to a worker at a time; memory grows with it (default: %(default)s)"
    add("--chunk-bytes", type=int, default=1 << 20, help=chunk)
    _add_tokenizer_options(parser)
    for name, reason in _NOT_NEEDED.items():
        parser.add_argument(name, nargs="*", action=_Refuse, help=argparse.SUPPRESS, const=reason)
    return parser


def _add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("tokenizer").add_argument
    kinds = f"{', '.join(TOKENIZER_TYPES)}; Megatron's names are understood"
    add("--tokenizer-type", required=True, metavar="TYPE", help=kinds)
    add("--tokenizer-model", metavar="PATH", help="the tokenizer's file, or folder with tokenizer.json")
    add("--vocab-file", metavar="PATH", help="vocab.json of a GPT-2 tokenizer, in place of --tokenizer-model")
    add("--merge-file", metavar="PATH", help="merges.txt of a GPT-2 tokenizer")
    add("--eod-token", metavar="TOKEN", help="the end-of-document token, where the tokenizer's files leave it open")
    special = "a control token's spelling in a text: plain text (default), the control token, or plain text and counted"
    add("--special-tokens-in-text", choices=SPECIAL_TOKEN_MODES, default="plain", help=special)
    add(
        "--tiktoken-pattern",
        metavar="NAME",
        help="how a tiktoken tokenizer splits text, where its file leaves it open: v1, v2, cl100k_base, ...",
    )
    add("--tiktoken-num-special-tokens", type=int, metavar="N", help="control tokens in front of the ranks of a JSON list (default: 1000)")
    add("--vocab-size", type=int, metavar="N", help="ids to use of a tiktoken JSON list (default: up to 131072)")
    backend = "auto takes faster ways that give the same ids, reference only the tokenizer's own library (default: auto)"
    add("--tokenizer-backend", choices=BACKENDS, default="auto", help=backend)


class _Refuse(argparse.Action):
    """Options of Megatron's tool that have no meaning here; each says what to do in place of it."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        parser.error(f"{option_string} is not needed: {self.const}")


def options_from(args: argparse.Namespace) -> PreprocessOptions:
    """The library's settings for parsed arguments."""
    return PreprocessOptions(
        inputs=tuple(args.input),
        output_prefix=args.output_prefix,
        tokenizer=_tokenizer_from(args),
        json_keys=tuple(args.json_keys),
        append_eod=args.append_eod,
        prepend_bos=args.prepend_bos,
        skip_invalid=args.skip_invalid,
        document_separator=args.document_separator,
        workers=args.workers,
        chunk_bytes=args.chunk_bytes,
    )


def _tokenizer_from(args: argparse.Namespace) -> TokenizerSpec:
    if args.vocab_file and args.tokenizer_model:
        raise ConfigError("give --tokenizer-model or --vocab-file, not both")
    if bool(args.vocab_file) != bool(args.merge_file):
        raise ConfigError("--vocab-file and --merge-file belong together: they are the two files of a GPT-2 tokenizer")
    return TokenizerSpec(
        args.tokenizer_type,
        args.vocab_file or args.tokenizer_model,
        args.special_tokens_in_text,
        args.eod_token,
        merge_file=args.merge_file,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        vocab_size=args.vocab_size,
        backend=args.tokenizer_backend,
    )


class Progress:
    """Shows counts on standard error: a bar on a terminal, otherwise a plain line now and then."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._last = self._start
        self._bar = self._task = None
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (progress.BarColumn(), progress.TaskProgressColumn(), progress.TextColumn("{task.description}"))
            left = (progress.TextColumn("ETA"), progress.TimeRemainingColumn())
            self._bar = progress.Progress(*columns, *left, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("reading ...", total=None)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, counts: Counts) -> None:
        now = time.perf_counter()
        if self._bar is not None and self._task is not None:
            description = describe(counts, now - self._start)
            self._bar.update(self._task, description=description, completed=counts.consumed, total=counts.total)
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
    print(json.dumps(_result(summary, mode)))


def _result(summary: Summary, mode: str) -> dict[str, object]:
    """The figures of a run; `tools/inspect_dataset.py PREFIX --verify` finds those of each output again."""
    counts = summary.counts
    per_output = ("documents", "empty_documents", "sequences", "tokens", "max_id", "bin_sha256")
    return {
        "records": counts.records,
        "skipped": counts.skipped,
        "documents": counts.documents,
        "empty": counts.empty,
        "sequences": counts.sequences,
        "tokens": counts.tokens,
        "text_bytes": counts.num_bytes,
        "special_strings": None if mode == "plain" else counts.special_strings,
        "seconds": round(summary.seconds, 3),
        "tokens_per_s": round(counts.tokens / max(summary.seconds, 1e-9), 1),
        "dtype": summary.dtype,
        "vocab_size": summary.vocab_size,
        "eod_id": summary.eod_id,
        "bos_id": summary.bos_id,
        "tokenizer_backend": summary.backend,
        "outputs": summary.outputs,
        "datasets": [{name: getattr(meta, name) for name in per_output} for meta in summary.metas],
    }


def _stop(signal_number: int, _frame: object) -> None:
    sys.exit(128 + signal_number)  # an exception, so that the output under way is removed


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    parsed = build_parser().parse_args(arguments)
    configure_logging(rank=0, world_size=1)
    signal.signal(signal.SIGTERM, _stop)
    try:
        options = options_from(parsed)
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
