"""Look at a dataset, or prove that its files are sound.

    python tools/inspect_dataset.py PREFIX                     figures and a histogram of document lengths
    python tools/inspect_dataset.py PREFIX --document 3        the text of document 3, by the recorded tokenizer
    python tools/inspect_dataset.py PREFIX --plot lengths.svg  the histogram as a picture
    python tools/inspect_dataset.py PREFIX --verify            read everything; exit with 1 and say what is wrong

The last line of standard output is the figures as JSON. Nothing of it needs torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from megalite.data.dataset_meta import DatasetMeta, read_meta
from megalite.data.indexed import IndexedDataset
from megalite.data.inspection import document_ids, document_lengths, facts, histogram, histogram_lines, verify
from megalite.data.tokenizer import TokenizerSpec
from megalite.data.tokenizer_record import spec_from_record, tokenizer_sha256
from megalite.errors import DataError, MegaliteError
from megalite.log import configure_logging

_SHOWN_IDS = 20


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("prefix", metavar="PREFIX", help="the dataset: PREFIX.bin and PREFIX.idx")
    parser.add_argument("--document", type=int, metavar="N", help="decode document N, counted from 0")
    parser.add_argument("--tokenizer-type", metavar="TYPE", help="decode with this tokenizer, not the recorded one")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="its file, or the recorded tokenizer's new place")
    parser.add_argument("--plot", metavar="FILE", help="write the histogram of document lengths as .svg or .png")
    parser.add_argument("--verify", action="store_true", help="read the whole files and check them")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; returns the exit code."""
    args = build_parser().parse_args(arguments)
    configure_logging(rank=0, world_size=1)
    try:
        figures, problems = inspect(args)
    except (MegaliteError, OSError, IndexError) as error:
        problems, figures = [" ".join(str(error).split())], {"prefix": args.prefix}
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    print(json.dumps({**figures, "ok": not problems, "problems": problems}))
    return 1 if problems else 0


def inspect(args: argparse.Namespace) -> tuple[dict[str, object], list[str]]:
    """Print what was asked for; returns the figures and what is wrong. Raises DataError for files that cannot be opened."""
    dataset, meta = IndexedDataset(args.prefix), read_meta(args.prefix)
    known = facts(dataset)
    lengths = document_lengths(dataset)
    figures: dict[str, object] = {"prefix": args.prefix, **asdict(known)}
    if meta is not None:
        figures |= {"tokenizer": meta.tokenizer, "vocab_size": meta.vocab_size, "eod_id": meta.eod_id, "bos_id": meta.bos_id}
    empty = f" ({known.empty_documents:,} empty)" if known.empty_documents else ""
    print(f"{args.prefix}: {known.documents:,} documents{empty}, {known.sequences:,} sequences, {known.tokens:,} tokens")
    print(f"ids are {known.dtype}, {known.bin_bytes:,} bytes; {_describe(meta)}")
    print(
        "tokens in a document:",
        ", ".join(f"{name} {value:,}" for name, value in known.percentiles.items()),
        f"mean {known.mean_length:,.1f}",
    )
    print("\n".join(histogram_lines(lengths)))
    if args.plot:
        _plot(lengths, Path(args.plot), args.prefix)
    if args.document is not None:
        _show_document(dataset, args.document, _tokenizer(args, meta))
    if not args.verify:
        return figures, []
    result = verify(dataset, meta)
    print("verified: every byte was read" if not result.problems else f"{len(result.problems)} problems")
    return figures | {"min_id": result.min_id, "max_id": result.max_id, "bin_sha256": result.bin_sha256}, result.problems


def _describe(meta: DatasetMeta | None) -> str:
    if meta is None:
        return "no side file, so the tokenizer is unknown"
    added = [f"EOD {meta.eod_id}" + (" appended" if meta.append_eod else " not appended")]
    added.append(f"BOS {meta.bos_id}" + (" prepended" if meta.prepend_bos else " not prepended"))
    return f"tokenizer {meta.tokenizer} with {meta.vocab_size:,} ids, {', '.join(added)}, largest id {meta.max_id}"


def _tokenizer(args: argparse.Namespace, meta: DatasetMeta | None) -> TokenizerSpec:
    """The tokenizer of the command line, else the recorded one. Raises DataError when it is not the one that made the data."""
    if args.tokenizer_type:
        return TokenizerSpec(args.tokenizer_type, args.tokenizer_model)
    if meta is None or not meta.tokenizer_spec:
        raise DataError(f"{args.prefix} does not record its tokenizer; give --tokenizer-type and --tokenizer-model")
    record = meta.tokenizer_spec | ({"tokenizer_model": args.tokenizer_model} if args.tokenizer_model else {})
    spec = spec_from_record(record)
    if spec.tokenizer_model and not Path(spec.tokenizer_model).exists():
        raise DataError(f"the recorded tokenizer {spec.tokenizer_model} is gone; give its new place with --tokenizer-model")
    if tokenizer_sha256(spec) != meta.tokenizer_sha256:
        raise DataError(f"{spec.tokenizer_model or spec.tokenizer_type} is not the tokenizer that made {args.prefix}: the digests differ")
    return spec


def _show_document(dataset: IndexedDataset, number: int, spec: TokenizerSpec) -> None:
    tokenizer = spec.build()
    for place, ids in enumerate(document_ids(dataset, number)):
        shown = " ".join(map(str, ids[:_SHOWN_IDS].tolist())) + (" ..." if len(ids) > _SHOWN_IDS else "")
        print(f"document {number}, sequence {place}: {len(ids):,} tokens: {shown}")
        print(tokenizer.decode(ids.tolist()))


def _plot(lengths, path: Path, prefix: str) -> None:
    from matplotlib.figure import Figure

    counts, edges = histogram(lengths)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(edges[:-1], counts, width=edges[1:] - edges[:-1], align="edge", edgecolor="white", linewidth=0.5)
    if edges[-1] - edges[0] > len(counts):
        axes.set_xscale("symlog", linthresh=1)
    axes.set(xlabel="tokens in a document", ylabel="documents", title=Path(prefix).name, xlim=(edges[0], edges[-1]))
    try:
        figure.savefig(path)
    except ValueError as error:  # an ending that matplotlib does not know
        raise DataError(f"cannot write {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
