"""Text corpus to token files: read, encode in workers, write, for each key.

    sources -> chunks of raw records -> workers: parse, encode -> in order -> one writer per key
            -> PREFIX_KEY_document.{bin,idx,meta.json}

Decisions. The output is a function of the input and the settings alone: chunks come back in order, whatever the
number of workers. All output has temporary names until everything was read, so a run that fails leaves nothing, or
what was there before. The `.idx` gets its name last, behind the side file, so a run that is killed leaves each dataset
complete or absent. A run that wrote no token is a failure. Ids are stored in the smallest dtype that holds the
tokenizer's largest id.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import BinaryIO

import numpy as np

from megalite.data.dataset_meta import DatasetMeta, write_meta
from megalite.data.documents import Chunk, find_sources, parse_separator, read_chunks, total_bytes
from megalite.data.encoding import EncodedChunk, EncodedDocuments, EncodeOptions, Encoder
from megalite.data.indexed import best_dtype, index_path
from megalite.data.indexed_writer import IndexedDatasetWriter
from megalite.data.tokenizer import Tokenizer, TokenizerSpec, find_losses
from megalite.data.tokenizer_record import recorded_spec, tokenizer_sha256
from megalite.data.worker_pool import map_in_order
from megalite.errors import ConfigError, DataError
from megalite.log import get_logger

__all__ = ["Counts", "PreprocessOptions", "Summary", "default_workers", "output_prefix", "preprocess"]

_MAX_DEFAULT_WORKERS = 16
_log = get_logger(__name__)


@dataclass(frozen=True)
class PreprocessOptions:
    """Settings of one run. `workers` = 1 encodes in this process.

    `document_separator` cuts text files (escapes as in parse_separator).
    """

    inputs: tuple[str, ...]
    output_prefix: str
    tokenizer: TokenizerSpec
    json_keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    prepend_bos: bool = False
    skip_invalid: bool = False
    document_separator: str | None = None
    workers: int = 1
    chunk_bytes: int = 1 << 20


@dataclass
class Counts:
    """What a run has done so far, over all keys; `documents` includes the empty ones, `num_bytes` is read text.

    `records` are the valid ones, so `documents` is `records` times the number of keys. `consumed` are bytes of the input
    files, of `total` (None when a pipe is among them).
    """

    records: int = 0
    consumed: int = 0
    total: int | None = None
    documents: int = 0
    empty: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    special_strings: int = 0
    num_bytes: int = 0
    problem: str | None = None
    backend: str = ""


@dataclass(frozen=True)
class Summary:
    """The result of a run; `outputs` are the prefixes written."""

    counts: Counts
    seconds: float
    dtype: str
    vocab_size: int
    eod_id: int | None
    bos_id: int | None
    outputs: list[str]
    metas: list[DatasetMeta]
    backend: str


@dataclass
class _Output:
    """One key's writer and what it has received."""

    prefix: str
    writer: IndexedDatasetWriter
    empty: int = 0
    max_id: int = -1


def default_workers() -> int:
    """One worker for each processor this process may use, within reason."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, _MAX_DEFAULT_WORKERS)


def output_prefix(prefix: str, key: str) -> str:
    """The dataset prefix of one key, named as Megatron names it."""
    return f"{prefix}_{key}_document"


def preprocess(options: PreprocessOptions, report: Callable[[Counts], None] | None = None, stdin: BinaryIO | None = None) -> Summary:
    """Write one dataset for each key; `report` is called after each chunk.

    Raises ConfigError for wrong settings, and DataError for unreadable input, an invalid record (named by file and
    line), a dead worker, or a run that produced no token. Then no output is left.
    """
    start = time.perf_counter()
    _check(options)
    sources = find_sources(options.inputs)
    if len(options.json_keys) > 1 and any(not source.is_json_lines for source in sources):
        raise ConfigError(f"text files have no keys, but {len(options.json_keys)} keys were asked for: {', '.join(options.json_keys)}")
    separator = None if options.document_separator is None else parse_separator(options.document_separator)
    # With workers only the facts are needed here, so the parent does not load the faster engine.
    tokenizer = (options.tokenizer if options.workers == 1 else replace(options.tokenizer, backend="reference")).build()
    _check_tokenizer(options, tokenizer)
    dtype = best_dtype(tokenizer.vocab_size - 1)
    counts = Counts(total=total_bytes(sources))
    chunks = read_chunks(sources, separator, options.chunk_bytes, stdin or getattr(sys.stdin, "buffer", None))
    with ExitStack() as stack:
        outputs = {}
        for key in options.json_keys:
            output = _Output(prefix := output_prefix(options.output_prefix, key), IndexedDatasetWriter(prefix, dtype))
            stack.callback(output.writer.abort)  # removes what has a temporary name, so nothing after publish()
            outputs[key] = output
        encoded = stack.enter_context(closing(_encode_all(chunks, options, tokenizer)))
        for chunk in encoded:
            _write_chunk(chunk, outputs, counts)
            if report is not None:
                report(counts)
        _check_result(outputs, counts)
        metas = _publish(list(outputs.values()), options, tokenizer)
    seconds = time.perf_counter() - start
    prefixes = [output.prefix for output in outputs.values()]
    ids = (tokenizer.vocab_size, tokenizer.eod_id, tokenizer.bos_id)
    return Summary(counts, seconds, dtype.name, *ids, prefixes, metas, counts.backend)


def _publish(outputs: list[_Output], options: PreprocessOptions, tokenizer: Tokenizer) -> list[DatasetMeta]:
    """Give all files their names once all of them are complete on disk, each dataset's .idx last."""
    for output in outputs:
        output.writer.prepare()
    metas = [_meta(options, tokenizer, output) for output in outputs]
    for output, meta in zip(outputs, metas, strict=True):
        index_path(output.prefix).unlink(missing_ok=True)  # from here on the old dataset is gone: its side file is replaced
        write_meta(output.prefix, meta)
        output.writer.publish()
    return metas


def _check(options: PreprocessOptions) -> None:
    violations = []
    if options.workers < 1:
        violations.append(f"workers is {options.workers}; it must be 1 (encode in this process) or more")
    if options.chunk_bytes < 1:
        violations.append(f"chunk_bytes is {options.chunk_bytes}; it must be positive")
    if not options.json_keys or len(set(options.json_keys)) != len(options.json_keys):
        violations.append(f"json keys are {list(options.json_keys)}; give one or more different keys")
    bad = [key for key in options.json_keys if not key or "/" in key or os.sep in key]
    if bad:
        violations.append(f"json keys {bad} cannot be part of a file name")
    if violations:
        raise ConfigError(violations)


def _check_tokenizer(options: PreprocessOptions, tokenizer: Tokenizer) -> None:
    """Refuse tokens that the tokenizer does not have, and warn once about what it loses."""
    if options.append_eod and tokenizer.eod_id is None:
        raise ConfigError(f"{tokenizer.name} has no end-of-document token to append; name one with --eod-token")
    if options.prepend_bos and tokenizer.bos_id is None:
        raise ConfigError(f"{tokenizer.name} has no beginning-of-sequence token to prepend")
    if options.tokenizer.kind not in ("bytes", "chars"):  # these lose nothing, and chars knows no other scripts
        losses = find_losses(tokenizer)
        if losses:
            _log.warning("%s does not give back every text: it changes %s", tokenizer.name, ", ".join(losses))


def _encode_all(chunks: Iterator[Chunk], options: PreprocessOptions, tokenizer: Tokenizer) -> Generator[EncodedChunk, None, None]:
    """Encoded chunks in order, from this process or from workers."""
    encode_options = EncodeOptions(
        json_keys=options.json_keys,
        append_eod=options.append_eod,
        prepend_bos=options.prepend_bos,
        skip_invalid=options.skip_invalid,
        count_special=options.tokenizer.special_tokens_in_text != "plain",
    )
    if options.workers == 1:
        yield from map(Encoder(tokenizer, encode_options).encode, chunks)
        return
    encode = partial(_encode_in_worker, options.tokenizer, encode_options)
    results = map_in_order(encode, chunks, options.workers, _set_up_worker)
    with closing(results):
        yield from results


def _set_up_worker() -> None:
    # The processes are the parallelism; the libraries read these in this worker only.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


@lru_cache(maxsize=1)
def _worker_encoder(spec: TokenizerSpec, options: EncodeOptions) -> Encoder:
    """A worker loads its tokenizer with the first chunk and keeps it."""
    return Encoder(spec.build(), options)


def _encode_in_worker(spec: TokenizerSpec, options: EncodeOptions, chunk: Chunk) -> EncodedChunk:
    return _worker_encoder(spec, options).encode(chunk)


def _write_chunk(chunk: EncodedChunk, outputs: dict[str, _Output], counts: Counts) -> None:
    counts.num_bytes += chunk.num_bytes
    counts.consumed += chunk.consumed
    counts.records += chunk.records
    counts.skipped += chunk.skipped
    counts.special_strings += chunk.special_strings
    counts.problem = counts.problem or chunk.problem
    counts.backend = chunk.backend
    for key, documents in chunk.keys.items():
        _write_documents(documents, outputs[key], counts)


def _write_documents(documents: EncodedDocuments, output: _Output, counts: Counts) -> None:
    output.writer.add_documents(documents.tokens, documents.sequence_lengths, documents.sequences_per_document)
    empty = int(np.count_nonzero(documents.sequences_per_document == 0))
    output.empty += empty
    output.max_id = max(output.max_id, int(documents.tokens.max(initial=0)) if len(documents.tokens) else -1)
    counts.documents += len(documents.sequences_per_document)
    counts.empty += empty
    counts.sequences += len(documents.sequence_lengths)
    counts.tokens += len(documents.tokens)


def _check_result(outputs: dict[str, _Output], counts: Counts) -> None:
    for key, output in outputs.items():
        if output.writer.num_tokens == 0:
            first = f"; the first problem: {counts.problem}" if counts.problem else ""
            raise DataError(
                f"no token was written for key {key!r}: {output.writer.num_documents} documents, "
                f"{output.empty} of them empty, {counts.skipped} invalid records skipped{first}"
            )


def _meta(options: PreprocessOptions, tokenizer: Tokenizer, output: _Output) -> DatasetMeta:
    return DatasetMeta(
        tokenizer=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        bos_id=tokenizer.bos_id,
        append_eod=options.append_eod,
        prepend_bos=options.prepend_bos,
        documents=output.writer.num_documents,
        empty_documents=output.empty,
        sequences=output.writer.num_sequences,
        tokens=output.writer.num_tokens,
        max_id=output.max_id,
        dtype=output.writer.dtype.name,
        tokenizer_sha256=tokenizer_sha256(options.tokenizer),
        tokenizer_spec=recorded_spec(options.tokenizer),
        bin_sha256=output.writer.bin_sha256,
    )
