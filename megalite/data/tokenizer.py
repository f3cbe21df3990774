"""Tokenizers: one small interface over bytes, characters, SentencePiece models and Hugging Face tokenizer files.

Decisions. Text is encoded as it stands: nothing is normalized or stripped here, and special tokens are never added by
`encode`. Whoever wants a BOS or EOD adds its id, so it is there exactly once. A special token's spelling inside a
text ("</s>" in a page about HTML) is plain text unless the caller asks for "allow". Every size comes from the largest
id, because files often hold more tokens than they declare. The same tokenizer must be rebuilt in worker processes, so
a `TokenizerSpec` of plain values describes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megalite.errors import ConfigError, DataError

__all__ = [
    "SPECIAL_TOKEN_MODES",
    "TOKENIZER_TYPES",
    "BytesTokenizer",
    "Tokenizer",
    "TokenizerSpec",
    "build_tokenizer",
    "find_losses",
]

TOKENIZER_TYPES = ("bytes", "chars", "sentencepiece", "hf")
SPECIAL_TOKEN_MODES = ("plain", "allow", "count")

# Megatron's spellings. They choose the kind of file; the ids of `bytes` are ours (EOD 256), not those of its ByteLevel.
_ALIASES = {
    "bytelevel": "bytes",
    "sentencepiecetokenizer": "sentencepiece",
    "gptsentencepiecetokenizer": "sentencepiece",
    "llama2tokenizer": "sentencepiece",
    "huggingfacetokenizer": "hf",
    "gpt2bpetokenizer": "hf",
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


class Tokenizer(Protocol):
    """Text to ids and back. Ids are in [0, vocab_size); `eod_id` and `bos_id` are None where the tokenizer has no
    such token.

    `special_strings` are the spellings of its control tokens. `decode` gives no text for control tokens and raises
    DataError for an id outside the vocabulary; `encode` raises DataError for text that has no UTF-8 form or that the
    vocabulary cannot express.
    """

    name: str
    vocab_size: int
    eod_id: int | None
    bos_id: int | None
    special_strings: tuple[str, ...]

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class TokenizerSpec:
    """All that is needed to build one tokenizer again, in another process or on another day."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    special_tokens_in_text: str = "plain"
    eod_token: str | None = None

    def build(self) -> Tokenizer:
        """Load the tokenizer; raises as `build_tokenizer`."""
        return build_tokenizer(
            self.tokenizer_type,
            self.tokenizer_model,
            special_tokens_in_text=self.special_tokens_in_text,
            eod_token=self.eod_token,
        )


class BytesTokenizer:
    """The 256 byte values of UTF-8 plus EOD (id 256): no file, nothing lost, 257 ids."""

    name = "bytes"
    vocab_size = 257
    bos_id: int | None = None
    special_strings: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.eod_id: int | None = 256

    def encode(self, text: str) -> list[int]:
        return list(utf8_bytes(text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """The text; bytes that form no UTF-8 (a generated or cut sequence) become U+FFFD."""
        check_ids(ids, self)
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | Path | None = None,
    *,
    special_tokens_in_text: str = "plain",
    eod_token: str | None = None,
) -> Tokenizer:
    """Load a tokenizer.

    `tokenizer_type` is one of TOKENIZER_TYPES (Megatron's names are understood too); `tokenizer_model` is its file or
    folder. `special_tokens_in_text` says what a control token's spelling inside a text becomes: "plain" text, the
    control token ("allow", hf only), or plain text that the caller also wants to "count". `eod_token` names the
    end-of-document token where the files leave it open. Raises ConfigError for a wrong setting, DataError for a
    missing, damaged or ambiguous tokenizer.
    """
    kind = _ALIASES.get(tokenizer_type.lower(), tokenizer_type.lower())
    _check_settings(kind, tokenizer_type, tokenizer_model, special_tokens_in_text, eod_token)
    if kind == "bytes":
        return BytesTokenizer()
    assert tokenizer_model is not None  # _check_settings
    path = Path(tokenizer_model)
    if not path.exists():
        raise DataError(f"tokenizer model {path} does not exist; give the path of a {kind} model")
    if kind == "chars":
        from megalite.data.tokenizer_files import CharsTokenizer

        return CharsTokenizer(path)
    if kind == "sentencepiece":
        from megalite.data.tokenizer_files import SentencePieceTokenizer

        return SentencePieceTokenizer(path, eod_token)
    from megalite.data.tokenizer_hf import HFTokenizer

    return HFTokenizer(path, allow_special=special_tokens_in_text == "allow", eod_token=eod_token)


def _check_settings(kind: str, given: str, model: str | Path | None, special: str, eod_token: str | None) -> None:
    """Raise one ConfigError that lists everything wrong with the settings of a tokenizer."""
    violations = []
    if kind not in TOKENIZER_TYPES:
        known = ", ".join([*TOKENIZER_TYPES, *_ALIASES])
        violations.append(f"tokenizer type {given!r} is unknown; the types are {known}")
    elif kind == "bytes" and model is not None:
        violations.append(f"the bytes tokenizer has no model file; leave {model} away or choose another tokenizer type")
    elif kind != "bytes" and model is None:
        violations.append(f"a {kind} tokenizer needs its model: give --tokenizer-model")
    if special not in SPECIAL_TOKEN_MODES:
        violations.append(f"special tokens in text: {special!r} is not one of {', '.join(SPECIAL_TOKEN_MODES)}")
    elif special == "allow" and kind in TOKENIZER_TYPES and kind != "hf":
        violations.append(f"a {kind} tokenizer reads no control tokens from text; 'allow' needs an hf tokenizer")
    if eod_token is not None and kind in ("bytes", "chars"):
        violations.append(f"a {kind} tokenizer has its own EOD id; an EOD token ({eod_token!r}) is for hf and sentencepiece")
    if violations:
        raise ConfigError(violations)


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
