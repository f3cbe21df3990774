"""Reading a corpus: files, compressed files and standard input, cut into chunks of raw records.

Decisions. The reader only cuts bytes; parsing and encoding happen in the workers. A record of a JSON-lines file ends
at a newline byte and nowhere else (Unicode line separators are part of the text). A text file is one document, or
several between separators. Records or text follows from the name alone, and a name that says nothing is an error:
guessing would turn a wrong file into zero documents. Compression follows from the name, or from the first bytes (which
no text begins with), so standard input may be compressed too. Memory is one chunk plus one record, so a corpus of any
size can be read. A compressed file that ends too early is damaged, never just shorter.
"""

from __future__ import annotations

import glob
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from megalite.errors import ConfigError, DataError

__all__ = ["STDIN", "Chunk", "Source", "find_sources", "parse_separator", "read_chunks", "total_bytes"]

STDIN = "-"
_BOM = b"\xef\xbb\xbf"
_JSON_LINES_SUFFIXES = (".jsonl", ".json")
_TEXT_SUFFIX = ".txt"
_COMPRESSIONS = (".gz", ".zst")
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
_ZSTD_INPUT_BYTES = 1 << 10  # decompressed at a time: the library has no limit for what comes out, 26 MB at the worst
_BLOCK_BYTES = 1 << 18
_MAX_CHUNK_RECORDS = 4096
_ESCAPES = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\f": "\f", "\\\\": "\\"}


@dataclass(frozen=True)
class Source:
    """One input: its path (or "-"), whether it holds JSON lines, and the compression that its name tells ("" for none)."""

    path: str
    is_json_lines: bool
    compression: str


@dataclass(frozen=True)
class Chunk:
    """Consecutive raw records of one source.

    `first` is the number of the first one, counted from 1 (line or document). `consumed` is how many bytes of the file
    itself (compressed, where it is) were read since the chunk before.
    """

    path: str
    is_json_lines: bool
    first: int
    records: list[bytes]
    consumed: int = 0

    def where(self, index: int) -> str:
        """How a message names record `index` of this chunk."""
        number = self.first + index
        return f"{self.path}:{number}" if self.is_json_lines else f"{self.path}: document {number}"


def find_sources(inputs: Sequence[str]) -> list[Source]:
    """The sources of file names, globs (in sorted order) and "-".

    Raises DataError for what is missing or has an unknown suffix.
    """
    if not inputs:
        raise ConfigError("no input: give files, globs or - for standard input")
    if list(inputs).count(STDIN) > 1:
        raise ConfigError("standard input (-) is given twice, but can be read once")
    sources = [_source(path) for name in inputs for path in _expand(name)]
    for source in sources:
        path = Path(source.path)
        if source.path != STDIN and not path.is_file() and not path.is_fifo():
            problem = f"is a folder; give its files, for example {path}/*.jsonl" if path.is_dir() else "does not exist"
            raise DataError(f"input {path} {problem}")
    return sources


def total_bytes(sources: Iterable[Source]) -> int | None:
    """The size of all files together, or None when a pipe is among them."""
    paths = [Path(source.path) for source in sources]
    return sum(path.stat().st_size for path in paths) if all(path.is_file() for path in paths) else None


def _expand(name: str) -> list[str]:
    if name == STDIN or Path(name).exists() or not glob.has_magic(name):
        return [name]
    found = sorted(path for path in glob.glob(name, recursive=True) if Path(path).is_file())
    if not found:
        raise DataError(f"no file matches {name}")
    return found


def _source(path: str) -> Source:
    if path == STDIN:
        return Source(path, is_json_lines=True, compression="")
    inner = Path(path)
    compression = inner.suffix if inner.suffix in _COMPRESSIONS else ""
    if compression:
        inner = inner.with_suffix("")
    if inner.suffix not in (*_JSON_LINES_SUFFIXES, _TEXT_SUFFIX) and not Path(path).is_dir():
        known = ", ".join([*_JSON_LINES_SUFFIXES, _TEXT_SUFFIX])
        raise DataError(f"input {path}: the name must end in {known}, or one of these and {' or '.join(_COMPRESSIONS)}")
    return Source(path, inner.suffix in _JSON_LINES_SUFFIXES, compression)


def parse_separator(text: str) -> bytes:
    """The bytes of a separator written with the escapes \\n, \\t, \\r, \\f and \\\\.

    Raises ConfigError for another or an empty one.
    """
    result, position = "", 0
    while position < len(text):
        escape = text[position : position + 2]
        if text[position] != "\\":
            result += text[position]
            position += 1
        elif escape in _ESCAPES:
            result += _ESCAPES[escape]
            position += 2
        else:
            raise ConfigError(f"document separator {text!r}: {escape!r} is no escape; there are {', '.join(_ESCAPES)}")
    if not result:
        raise ConfigError("the document separator is empty; leave it away to read each text file as one document")
    return result.encode("utf-8")


def read_chunks(sources: Iterable[Source], separator: bytes | None, chunk_bytes: int, stdin: BinaryIO | None) -> Iterator[Chunk]:
    """All records of all sources in order, in chunks of about `chunk_bytes` (at least one record each).

    `separator` cuts text files into documents (None: one document per file); JSON lines end at a newline.
    Raises DataError for files that cannot be read or are damaged.
    """
    for source in sources:
        consumed = _Consumed()
        blocks = _without_bom(_read_blocks(source, stdin, consumed))
        records = _split(blocks, b"\n" if source.is_json_lines else separator)
        first, held, size = 1, [], 0
        for record in records:
            held.append(record)
            size += len(record)
            if size >= chunk_bytes or len(held) == _MAX_CHUNK_RECORDS:
                yield Chunk(source.path, source.is_json_lines, first, held, consumed.take())
                first, held, size = first + len(held), [], 0
        if held:
            yield Chunk(source.path, source.is_json_lines, first, held, consumed.take())


class _Consumed:
    """Counts the bytes that were read of a file."""

    def __init__(self) -> None:
        self.count = 0

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


def _read_blocks(source: Source, stdin: BinaryIO | None, consumed: _Consumed) -> Iterator[bytes]:
    if source.path == STDIN:
        if stdin is None:
            raise DataError("there is no standard input to read")
        yield from _plain_blocks(source, _file_blocks(stdin, consumed))
        return
    try:
        with open(source.path, "rb") as file:
            yield from _plain_blocks(source, _file_blocks(file, consumed))
    except OSError as error:
        raise DataError(f"cannot read {source.path}: {error.strerror or error}") from None


def _file_blocks(file: Any, consumed: _Consumed) -> Iterator[bytes]:
    # One system call at a time: a pipe's data arrive as they come, and Ctrl-C is noticed between two of them.
    while block := file.read1(_BLOCK_BYTES):
        consumed.count += len(block)
        yield block


def _plain_blocks(source: Source, blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The blocks, decompressed where the name or the first bytes tell so."""
    head = b""
    for block in blocks:
        head += block
        if len(head) >= 4:
            break
    blocks = chain([head] if head else [], blocks)
    found = next((suffix for magic, suffix in _MAGIC.items() if head.startswith(magic)), "")
    compression = source.compression or found
    if compression == ".gz":
        return _decompressed(source.path, "gzip", blocks, lambda: zlib.decompressobj(wbits=31), zlib.error)
    if compression == ".zst":
        try:
            import zstandard
        except ImportError:
            raise DataError(f"{source.path} needs the zstandard package: pip install zstandard") from None
        pieces = (block[start : start + _ZSTD_INPUT_BYTES] for block in blocks for start in range(0, len(block), _ZSTD_INPUT_BYTES))
        decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        return _decompressed(source.path, "zstd", pieces, decompressor.decompressobj, zstandard.ZstdError)
    return blocks


def _decompressed(
    path: str, kind: str, blocks: Iterable[bytes], new_decoder: Callable[[], Any], failure: type[Exception]
) -> Iterator[bytes]:
    """The contents of all members (frames) of a compressed file, one after the other."""
    limit = [_BLOCK_BYTES] if kind == "gzip" else []
    decoder: Any = None
    is_empty = True
    for block in blocks:
        while block:
            if decoder is None and not is_empty and not block.strip(b"\0"):
                break  # zero bytes behind the last member are padding
            decoder = decoder or new_decoder()
            is_empty = False
            try:
                yield decoder.decompress(block, *limit)
            except failure as error:
                raise DataError(f"{path}: damaged {kind} data: {error}") from None
            block = getattr(decoder, "unconsumed_tail", b"")
            if decoder.eof:
                block, decoder = decoder.unused_data, None
    if decoder is not None or is_empty:
        raise DataError(f"{path}: damaged {kind} data: the file {'is empty' if is_empty else 'ends too early'}")


def _without_bom(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The blocks without a byte order mark at the start, which pipes may deliver in pieces."""
    head: bytes | None = b""
    for block in blocks:
        if head is None:
            yield block
            continue
        head += block
        if len(head) >= len(_BOM):
            yield head.removeprefix(_BOM)
            head = None
    if head:
        yield head


def _split(blocks: Iterable[bytes], separator: bytes | None) -> Iterator[bytes]:
    """The pieces between separators, without them; an empty piece at the very end is no piece.

    A piece may span many blocks, so each byte is searched once only.
    """
    pending, searched = bytearray(), 0
    for block in blocks:
        pending += block
        if separator is None:
            continue
        start = 0
        while (end := pending.find(separator, max(start, searched))) >= 0:
            yield bytes(memoryview(pending)[start:end])
            start = end + len(separator)
        del pending[:start]
        searched = max(0, len(pending) - len(separator) + 1)
    if pending:
        yield bytes(pending)
