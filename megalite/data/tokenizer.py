"""Tokenizers: one small interface over bytes, characters, SentencePiece models, Hugging Face and tiktoken files.

Decisions. Text is encoded as it stands: nothing is normalized or stripped here, and special tokens are never added by
`encode`. Whoever wants a BOS or EOD adds its id, so it is there exactly once. A special token's spelling inside a
text ("</s>" in a page about HTML) is plain text unless the caller asks for "allow". Every size comes from the largest
id, because files often hold more tokens than they declare. The same tokenizer must be rebuilt in worker processes, so
a `TokenizerSpec` of plain values describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from megalite.errors import ConfigError, DataError

__all__ = [
    "BACKENDS",
    "SPECIAL_TOKEN_MODES",
    "TOKENIZER_TYPES",
    "BytesTokenizer",
    "FlatIds",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "find_losses",
    "flatten",
    "tokenizer_kind",
]

TOKENIZER_TYPES = ("bytes", "chars", "sentencepiece", "hf", "tiktoken")
BACKENDS = ("auto", "reference")
SPECIAL_TOKEN_MODES = ("plain", "allow", "count")

# Megatron's spellings. They choose the kind of file; the ids of `bytes` are ours (EOD 256), not those of its ByteLevel.
_ALIASES = {
    "bytelevel": "bytes",
    "sentencepiecetokenizer": "sentencepiece",
    "gptsentencepiecetokenizer": "sentencepiece",
    "llama2tokenizer": "sentencepiece",
    "huggingfacetokenizer": "hf",
    "gpt2bpetokenizer": "hf",
    "tiktokenizer": "tiktoken",
}

# What a tokenizer may lose, each with a text that shows it.
_PROBES = {
    "repeated spaces": "a  b   c",
    "spaces at the ends": " a ",
    "newlines": "a\nb\n\nc\n",
    "tabs": "a\tb",
    "carriage returns": "a\r\nb",
    "compatibility characters": "\ufb01 \u2460 \uff21",
    "accents": "\u00e9 e\u0301",
    "other scripts": "\u4e2d\u044f\U0001f600",
    "upper case": "aA",
}


class FlatIds(NamedTuple):
    """The ids of several texts, one after the other: `ids` int32 [T] and the number of each text's, `lengths` int64 [texts]."""

    ids: np.ndarray
    lengths: np.ndarray


class Tokenizer(Protocol):
    """Text to ids and back. Ids are in [0, vocab_size); `eod_id` and `bos_id` are None where the tokenizer has no
    such token.

    `special_strings` are the spellings of its control tokens, `control_tokens` those with their ids. `decode` gives no text for
    control tokens and raises DataError for an id outside the vocabulary; `encode` raises DataError for text that has no UTF-8
    form or that the vocabulary cannot express. `encode_flat` gives the ids of `encode_batch` in one array, by the fastest way that is
    proven equal; `backend` names it.
    """

    name: str
    vocab_size: int
    eod_id: int | None
    bos_id: int | None
    special_strings: tuple[str, ...]
    control_tokens: dict[str, int]
    backend: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def encode_flat(self, texts: Sequence[str]) -> FlatIds: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class TokenizerSpec:
    """All that is needed to build one tokenizer again, in another process or on another day.

    `tokenizer_type` is one of TOKENIZER_TYPES or Megatron's name for it; `tokenizer_model` its file or folder, and `merge_file`
    the other file of a GPT-2 vocabulary. `special_tokens_in_text` says what a control token's spelling inside a text becomes:
    "plain" text, the control token ("allow"), or plain text that the caller also wants to "count". `eod_token` names the
    end-of-document token where the files leave it open. The `tiktoken_` settings and `vocab_size` are for tiktoken files.
    `backend` "reference" leaves the faster ways of `encode_flat` unused.
    """

    tokenizer_type: str
    tokenizer_model: str | None = None
    special_tokens_in_text: str = "plain"
    eod_token: str | None = None
    merge_file: str | None = None
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int | None = None
    vocab_size: int | None = None
    backend: str = "auto"

    @property
    def kind(self) -> str:
        """The type in our own names."""
        return tokenizer_kind(self.tokenizer_type)

    def build(self) -> Tokenizer:
        """Load the tokenizer. Raises ConfigError for wrong settings, DataError for a missing, damaged or ambiguous tokenizer."""
        _check_settings(self)
        if self.kind == "bytes":
            return BytesTokenizer()
        assert self.tokenizer_model is not None  # _check_settings
        path = Path(self.tokenizer_model)
        for file in (path, *([Path(self.merge_file)] if self.merge_file else [])):
            if not file.exists():
                raise DataError(f"tokenizer model {file} does not exist; give the path of a {self.kind} model")
        return _load(self, path)


class BytesTokenizer:
    """The 256 byte values of UTF-8 plus EOD (id 256): no file, nothing lost, 257 ids."""

    name = "bytes"
    vocab_size = 257
    bos_id: int | None = None
    special_strings: tuple[str, ...] = ()
    backend = "reference"

    def __init__(self) -> None:
        self.eod_id: int | None = 256
        self.control_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        return list(utf8_bytes(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        encoded = [utf8_bytes(text) for text in texts]
        ids = np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.int32)
        return FlatIds(ids, np.fromiter(map(len, encoded), np.int64, len(encoded)))

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that form no UTF-8 (a generated or cut sequence) become U+FFFD."""
        check_ids(ids, self)
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def tokenizer_kind(tokenizer_type: str) -> str:
    """Our name of a tokenizer type; an unknown one comes back in lower case."""
    return _ALIASES.get(tokenizer_type.lower(), tokenizer_type.lower())


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | Path | None = None, **options: Any) -> Tokenizer:
    """Load a tokenizer; arguments, options and errors are those of TokenizerSpec and its `build`."""
    return TokenizerSpec(tokenizer_type, None if tokenizer_model is None else str(tokenizer_model), **options).build()


def _load(spec: TokenizerSpec, path: Path) -> Tokenizer:
    use_fast = spec.backend == "auto"
    allow_special = spec.special_tokens_in_text == "allow"
    if spec.kind == "chars":
        from megalite.data.tokenizer_files import CharsTokenizer

        return CharsTokenizer(path)
    if spec.kind == "sentencepiece":
        from megalite.data.tokenizer_files import SentencePieceTokenizer

        return SentencePieceTokenizer(path, spec.eod_token, use_fast)
    if spec.kind == "tiktoken":
        from megalite.data.tokenizer_tiktoken import TiktokenTokenizer

        return TiktokenTokenizer(path, spec)
    from megalite.data.tokenizer_hf import HFTokenizer

    return HFTokenizer(path, allow_special, spec.eod_token, merges=spec.merge_file, use_fast=use_fast)


def _check_settings(spec: TokenizerSpec) -> None:
    """Raise one ConfigError that lists everything wrong with the settings of a tokenizer."""
    kind, model = spec.kind, spec.tokenizer_model
    known = kind in TOKENIZER_TYPES
    violations = []
    if not known:
        types = ", ".join([*TOKENIZER_TYPES, *_ALIASES])
        violations.append(f"tokenizer type {spec.tokenizer_type!r} is unknown; the types are {types}")
    elif kind == "bytes" and model is not None:
        violations.append(f"the bytes tokenizer has no model file; leave {model} away or choose another tokenizer type")
    elif kind != "bytes" and model is None:
        violations.append(f"a {kind} tokenizer needs its model: give --tokenizer-model")
    mode = spec.special_tokens_in_text
    if mode not in SPECIAL_TOKEN_MODES:
        violations.append(f"special tokens in text: {mode!r} is not one of {', '.join(SPECIAL_TOKEN_MODES)}")
    elif mode == "allow" and known and kind not in ("hf", "tiktoken"):
        violations.append(f"a {kind} tokenizer reads no control tokens from text; 'allow' needs an hf or tiktoken tokenizer")
    if spec.eod_token is not None and kind in ("bytes", "chars"):
        violations.append(f"a {kind} tokenizer has its own EOD id; an EOD token ({spec.eod_token!r}) is for hf, sentencepiece and tiktoken")
    if spec.merge_file is not None and known and kind != "hf":
        violations.append(f"a {kind} tokenizer has no merge file ({spec.merge_file}); it is for GPT-2's vocab.json")
    if known and kind != "tiktoken":
        for name in ("tiktoken_pattern", "tiktoken_num_special_tokens", "vocab_size"):
            if getattr(spec, name) is not None:
                violations.append(f"{name} is {getattr(spec, name)!r}, but a {kind} tokenizer does not take it: it is for tiktoken files")
    if spec.backend not in BACKENDS:
        violations.append(f"tokenizer backend {spec.backend!r} is not one of {', '.join(BACKENDS)}")
    if violations:
        raise ConfigError(violations)


def flatten(encoded: Sequence[Sequence[int]]) -> FlatIds:
    """The ids of several texts in one array."""
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return FlatIds(np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths)


def find_losses(tokenizer: Tokenizer) -> list[str]:
    """What `decode(encode(text))` does not give back ("newlines", "accents", ...); empty for a lossless tokenizer."""
    return [what for what, text in _PROBES.items() if tokenizer.decode(tokenizer.encode(text)) != text]


def utf8_bytes(text: str) -> bytes:
    """The UTF-8 form of a text; raises DataError for a lone surrogate, which has none."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(f"text holds the lone surrogate U+{code:04X} at position {error.start}, which has no UTF-8 form") from None


def check_ids(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Raise DataError for an id outside the tokenizer's vocabulary."""
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(f"token id {token} is outside the vocabulary of {tokenizer.name} (0 to {tokenizer.vocab_size - 1})")
