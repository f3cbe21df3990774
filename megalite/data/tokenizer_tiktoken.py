"""tiktoken files, in the plain form (`base64 rank` lines) and in Megatron's JSON list, read with the optional package tiktoken.

Decisions. A file of ranks says neither how text is split before merging nor which control tokens there are. For the published
files both follow from the name; any other plain file needs `FILE.json` beside it,

    {"pattern": "o200k_base", "special_tokens": {"<|eot|>": 200}, "eod_token": "<|eot|>", "bos_token": null}

or a named pattern (then without control tokens). A wrong guess would give wrong ids for ever and nobody would see it, so
nothing is guessed. In Megatron's JSON list [{"rank", "token_bytes" (base64), "token_str"}] the control tokens take the first
ids (1000 by default), the ranks follow; EOD is `</s>` (2) and BOS `<s>` (1), the pattern v2 unless named, and the vocabulary
is cut at 131072 ids unless told otherwise.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from megalite.data.tokenizer import FlatIds, TokenizerSpec, check_ids, flatten, utf8_bytes
from megalite.data.tokenizer_files import load_json
from megalite.errors import ConfigError, DataError

__all__ = ["PATTERNS", "TiktokenTokenizer"]

_MEGATRON_SPECIALS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
_MEGATRON_NUM_SPECIALS = 1000
_MEGATRON_VOCAB = 131_072
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_LETTER = r"[^\r\n\p{L}\p{N}]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
PATTERNS = {
    "r50k_base": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k_base": rf"{_CONTRACTION}|{_NOT_LETTER}?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    "o200k_base": (
        rf"{_NOT_LETTER}?{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_NOT_LETTER}?{_UPPER}+{_LOWER}*{_CONTRACTION}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"
    ),
    "qwen": rf"{_CONTRACTION}|{_NOT_LETTER}?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    "v1": rf"{_NOT_LETTER}?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": rf"{_NOT_LETTER}?{_UPPER}*{_LOWER}+|{_NOT_LETTER}?{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
}


@dataclass(frozen=True)
class _Settings:
    """How the ranks of a file are used: the splitting pattern, control tokens by spelling, and which of them are EOD and BOS."""

    pattern: str
    special_tokens: dict[str, int] = field(default_factory=dict)
    eod_token: str | None = None
    bos_token: str | None = None


_END = "<|endoftext|>"
_CL100K_SPECIALS = {_END: 100257, "<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260, "<|endofprompt|>": 100276}
_QWEN_SPECIALS = {_END: 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
_PUBLISHED = {
    "gpt2": _Settings("r50k_base", {_END: 50256}, _END),
    "r50k_base": _Settings("r50k_base", {_END: 50256}, _END),
    "p50k_base": _Settings("r50k_base", {_END: 50256}, _END),
    "cl100k_base": _Settings("cl100k_base", _CL100K_SPECIALS, _END),
    "o200k_base": _Settings("o200k_base", {_END: 199999, "<|endofprompt|>": 200018}, _END),
    "qwen": _Settings("qwen", _QWEN_SPECIALS, _END),
}


class TiktokenTokenizer:
    """A tiktoken file in either form; `spec` holds the settings that its file leaves open."""

    backend = "tiktoken"

    def __init__(self, path: Path, spec: TokenizerSpec) -> None:
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(f"{path} needs the tiktoken package: pip install 'megalite[tiktoken]'") from None
        if spec.tiktoken_pattern is not None and spec.tiktoken_pattern not in PATTERNS:
            raise ConfigError(f"tiktoken pattern {spec.tiktoken_pattern!r} is not one of {', '.join(PATTERNS)}")
        content = _read(path)
        is_json = content.lstrip()[:1] in (b"[", b"{")
        ranks, settings = _megatron(path, content, spec) if is_json else _plain(path, content, spec)
        clash = set(settings.special_tokens.values()).intersection(ranks.values())
        if clash or len(set(settings.special_tokens.values())) < len(settings.special_tokens):
            told = f"id {min(clash)} is the rank of an ordinary piece too" if clash else "two of them have the same id"
            raise DataError(f"{path}: the control tokens are wrong: {told}")
        self.name = f"tiktoken:{path.name}"
        self._encoding = tiktoken.Encoding(
            self.name, pat_str=PATTERNS[settings.pattern], mergeable_ranks=ranks, special_tokens=settings.special_tokens
        )
        self._bytes = {token: piece for piece, token in ranks.items()}
        self._specials = set(settings.special_tokens.values())
        self._allow_special = spec.special_tokens_in_text == "allow"
        self.vocab_size = max(*self._bytes, *self._specials, -1) + 1
        self.eod_id: int | None = _special_id(path, settings, spec.eod_token or settings.eod_token)
        self.bos_id: int | None = _special_id(path, settings, settings.bos_token)
        self.special_strings: tuple[str, ...] = tuple(settings.special_tokens)
        self.control_tokens = dict(settings.special_tokens)

    def encode(self, text: str) -> list[int]:
        utf8_bytes(text)
        if self._allow_special:
            return self._encoding.encode(text, allowed_special="all")
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        return flatten(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        """The text; ids that end inside a character give U+FFFD, ids between the pieces and the control tokens give nothing."""
        check_ids(ids, self)
        return b"".join(self._bytes.get(int(token), b"") for token in ids).decode("utf-8", errors="replace")


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the tiktoken file itself")
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _plain(path: Path, content: bytes, spec: TokenizerSpec) -> tuple[dict[bytes, int], _Settings]:
    """Ranks and settings of a file of `base64 rank` lines."""
    for name in ("tiktoken_num_special_tokens", "vocab_size"):
        if getattr(spec, name) is not None:
            raise ConfigError(f"{path} is a plain tiktoken file; {name} is for Megatron's JSON form")
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            piece, rank = line.split()
            ranks[base64.b64decode(piece, validate=True)] = int(rank)
        except (ValueError, binascii.Error):
            raise DataError(f"{path} is no tiktoken file: line {number} is not 'base64 rank' but {line[:40]!r}") from None
    _check_ranks(path, ranks, len([line for line in content.split(b"\n") if line.strip()]))
    return ranks, _plain_settings(path, spec)


def _plain_settings(path: Path, spec: TokenizerSpec) -> _Settings:
    beside = path.with_name(f"{path.name}.json")
    published = _PUBLISHED.get(path.name.removesuffix(".tiktoken"))
    if beside.exists():
        settings = _read_settings(beside)
    elif published is not None:
        settings = published
    elif spec.tiktoken_pattern is not None:
        settings = _Settings(spec.tiktoken_pattern)
    else:
        raise DataError(
            f"{path} does not say how text is split: name the pattern with --tiktoken-pattern ({', '.join(PATTERNS)}), write "
            f'{beside.name} beside it ({{"pattern": ..., "special_tokens": {{...}}, "eod_token": ...}}), or use a published file name '
            f"({', '.join(_PUBLISHED)})"
        )
    if spec.tiktoken_pattern is not None and PATTERNS[settings.pattern] != PATTERNS[spec.tiktoken_pattern]:
        raise ConfigError(
            f"{path}: the tiktoken pattern is {settings.pattern} by its file or name, but {spec.tiktoken_pattern} was asked for"
        )
    return settings


def _read_settings(path: Path) -> _Settings:
    content = load_json(path)
    allowed = {"pattern", "special_tokens", "eod_token", "bos_token"}
    if not isinstance(content, dict) or content.get("pattern") not in PATTERNS or not set(content) <= allowed:
        raise DataError(f"{path} must be an object with a pattern ({', '.join(PATTERNS)}) and only {', '.join(sorted(allowed))}")
    specials = content.get("special_tokens", {})
    if not isinstance(specials, dict) or not all(isinstance(token, int) and token >= 0 for token in specials.values()):
        raise DataError(f"{path}: special_tokens must be an object of spellings and ids")
    return _Settings(content["pattern"], specials, content.get("eod_token"), content.get("bos_token"))


def _megatron(path: Path, content: bytes, spec: TokenizerSpec) -> tuple[dict[bytes, int], _Settings]:
    """Ranks (moved behind the control tokens) and settings of Megatron's JSON list."""
    num_specials = _MEGATRON_NUM_SPECIALS if spec.tiktoken_num_special_tokens is None else spec.tiktoken_num_special_tokens
    try:
        entries = orjson.loads(content)
        pieces = [base64.b64decode(entry["token_bytes"], validate=True) for entry in entries]
        wrong = [number for number, entry in enumerate(entries) if entry["rank"] != number]
    except (KeyError, TypeError, ValueError) as error:  # among them the errors of orjson and base64
        raise DataError(f"{path} is no list of objects with rank, token_bytes (base64) and token_str: {error!r}") from None
    if wrong:
        raise DataError(f"{path}: entry {wrong[0]} has rank {entries[wrong[0]]['rank']}; ranks must count up from 0")
    if num_specials < len(_MEGATRON_SPECIALS):
        raise ConfigError(f"{num_specials} control tokens were asked for; there are at least {len(_MEGATRON_SPECIALS)}")
    vocab_size = min(_MEGATRON_VOCAB, len(pieces) + num_specials) if spec.vocab_size is None else spec.vocab_size
    if not 256 + num_specials <= vocab_size <= len(pieces) + num_specials:
        raise ConfigError(
            f"vocab_size {vocab_size}: {path} has {len(pieces)} pieces, so with {num_specials} control tokens it can be "
            f"{256 + num_specials} to {len(pieces) + num_specials}"
        )
    pieces = pieces[: vocab_size - num_specials]
    _check_ranks(path, dict(zip(pieces, range(len(pieces)), strict=True)), len(pieces))
    names = [*_MEGATRON_SPECIALS, *(f"<SPECIAL_{number}>" for number in range(len(_MEGATRON_SPECIALS), num_specials))]
    specials = {name: number for number, name in enumerate(names)}
    ranks = {piece: rank + num_specials for rank, piece in enumerate(pieces)}
    return ranks, _Settings(spec.tiktoken_pattern or "v2", specials, "</s>", "<s>")


def _check_ranks(path: Path, ranks: dict[bytes, int], num_entries: int) -> None:
    """A usable file has each piece and each rank once, and all 256 bytes."""
    if len(ranks) != num_entries or len(set(ranks.values())) != num_entries or min(ranks.values(), default=0) < 0:
        raise DataError(f"{path}: {num_entries} entries, but {len(ranks)} different pieces with {len(set(ranks.values()))} different ranks")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f"{path}: byte 0x{missing[0]:02x} has no rank, so some texts could not be encoded ({len(missing)} bytes are missing)"
        )


def _special_id(path: Path, settings: _Settings, token: str | None) -> int | None:
    if token is None:
        return None
    if token not in settings.special_tokens:
        known = ", ".join(list(settings.special_tokens)[:10]) or "none"
        raise DataError(f"{path} has no control token {token!r}; it has {known}")
    return settings.special_tokens[token]
