"""Hugging Face tokenizer files, read with `tokenizers` alone.

Decisions. `tokenizer.json` may carry truncation and padding settings from somebody's fine-tuning; both are switched
off, as they would cut documents silently. Its post-processor (which adds BOS or EOS) is not used. Which token ends a
document is not in `tokenizer.json`: it is looked up in the files beside it, in the order tokenizer_config.json and
special_tokens_map.json (which must agree), config.json, then the well-known names. Two candidates are an error and
never a guess, because a wrong EOD cannot be seen in the data afterwards. A folder with GPT-2's vocab.json and
merges.txt is read as byte-level BPE.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from megalite.data.fast_backend import FastBackend, fast_backend
from megalite.data.tokenizer import FlatIds, check_ids, flatten, utf8_bytes
from megalite.data.tokenizer_files import load_json
from megalite.errors import DataError

__all__ = ["HFTokenizer"]

_WELL_KNOWN_EOD = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<eod>", "<|eos|>", "<EOD>")
_WELL_KNOWN_BOS = ("<s>", "<|begin_of_text|>", "<bos>", "[BOS]")


class HFTokenizer:
    """A `tokenizer.json`, a folder that holds one (or vocab.json and merges.txt), or a vocab.json with `merges`."""

    def __init__(
        self, path: Path, allow_special: bool = False, eod_token: str | None = None, *, merges: str | None = None, use_fast: bool = True
    ) -> None:
        folder = path if path.is_dir() else path.parent
        backend = _load_gpt2(path, Path(merges)) if merges else _load_backend(path)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = not allow_special
        self.name = f"hf:{path.resolve().name if path.is_dir() else path.name}"
        self._backend = backend
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eod_id: int | None = _find_token(backend, folder, "eos", _WELL_KNOWN_EOD, eod_token)
        self.bos_id: int | None = _find_token(backend, folder, "bos", _WELL_KNOWN_BOS, None)
        specials = {token: added.content for token, added in backend.get_added_tokens_decoder().items() if added.special}
        for token in (self.eod_id, self.bos_id):  # GPT-2's vocab.json does not mark them as special
            if token is not None:
                specials[token] = str(backend.id_to_token(token))
        self._special_ids = frozenset(specials)
        self.special_strings: tuple[str, ...] = tuple(specials[token] for token in sorted(specials))
        self.control_tokens = {spelling: token for token, spelling in specials.items()}
        # Models that look up whole pieces (Unigram, WordLevel) still find a special spelling among their own pieces.
        self._inseparable = [] if allow_special else [s for s in self.special_strings if self._holds_special(s)]
        self._fast: FastBackend | None = fast_backend(backend, allow_special) if use_fast else None
        self.backend = "reference" if self._fast is None else self._fast.name

    def _holds_special(self, text: str) -> bool:
        return not self._special_ids.isdisjoint(self._backend.encode(text, add_special_tokens=False).ids)

    def encode(self, text: str) -> list[int]:
        self._check_text(text)
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            self._check_text(text)
        return [encoding.ids for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        if self._fast is None:
            return flatten(self.encode_batch(texts))
        for text in texts:
            self._check_text(text)
        return self._fast.encode_flat(texts)

    def _check_text(self, text: str) -> None:
        utf8_bytes(text)
        for spelling in self._inseparable:
            if spelling in text:
                raise DataError(
                    f"text holds {spelling!r} at position {text.index(spelling)}, which {self.name} "
                    "can only read as its control token; take it out of the text or allow special tokens in text"
                )

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self)
        kept = [int(token) for token in ids if token not in self._special_ids]
        return self._backend.decode(kept, skip_special_tokens=False)


def _load_backend(path: Path) -> Backend:
    """The tokenizer of a file or folder, with truncation and padding as the file has them."""
    file = path / "tokenizer.json" if path.is_dir() else path
    vocab, merges = path / "vocab.json", path / "merges.txt"
    if path.is_dir() and not file.exists() and vocab.exists() and merges.exists():
        return _load_gpt2(vocab, merges)
    if not file.exists():
        raise DataError(f"{path} holds neither tokenizer.json nor vocab.json with merges.txt")
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{file} is no Hugging Face tokenizer file: {error}") from None


def _load_gpt2(vocab: Path, merges: Path) -> Backend:
    """GPT-2's byte-level BPE, whose pattern and alphabet are not in its two files."""
    try:
        backend = Backend(models.BPE.from_file(str(vocab), str(merges)))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{vocab} and {merges} are no GPT-2 vocabulary: {error}") from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _find_token(backend: Backend, folder: Path, role: str, well_known: Sequence[str], named: str | None) -> int | None:
    """The id of the token with a role ("eos", "bos"), or None where there is none.

    Raises DataError when two tokens qualify.
    """
    if named is not None:
        return _token_id(backend, named, "--eod-token")
    names = {file: _named_token(folder / file, f"{role}_token") for file in ("tokenizer_config.json", "special_tokens_map.json")}
    spellings = {file: token for file, token in names.items() if token is not None}
    if len(set(spellings.values())) > 1:
        told = " and ".join(f"{token!r} ({file})" for file, token in spellings.items())
        raise DataError(f"{folder}: the {role} token is both {told}; make the files agree or name one with --eod-token")
    for file, token in spellings.items():
        return _token_id(backend, token, file)
    ids = _configured_ids(folder / "config.json", f"{role}_token_id")
    source = "config.json lists" if ids else "the vocabulary holds"
    if not ids:
        ids = _well_known_ids(backend, well_known)
    if len(ids) > 1:
        told = ", ".join(f"{token} ({backend.id_to_token(token)!r})" for token in ids)
        flag = "--eod-token or in " if role == "eos" else ""
        raise DataError(f"{folder}: {source} several {role} tokens: {told}; name one with {flag}tokenizer_config.json")
    if ids and backend.id_to_token(ids[0]) is None:
        raise DataError(f"{folder}/config.json: {role}_token_id {ids[0]} is not in the vocabulary")
    return ids[0] if ids else None


def _well_known_ids(backend: Backend, names: Sequence[str]) -> list[int]:
    """The ids of the well-known names in the vocabulary.

    Those marked as special go before ordinary pieces of that spelling.
    """
    ids = [token for name in names if (token := backend.token_to_id(name)) is not None]
    special = {token for token, added in backend.get_added_tokens_decoder().items() if added.special}
    return [token for token in ids if token in special] or ids


def _token_id(backend: Backend, token: str, source: str) -> int:
    index = backend.token_to_id(token)
    if index is None:
        raise DataError(f"token {token!r} ({source}) is not in the tokenizer's vocabulary")
    return index


def _named_token(path: Path, key: str) -> str | None:
    """The token that a file names: a string, or an object with its `content`.

    None when the file or the key is missing.
    """
    content = load_json(path) if path.exists() else None
    value = content.get(key) if isinstance(content, dict) else None
    if isinstance(value, dict):
        value = value.get("content")
    if value is not None and not isinstance(value, str):
        raise DataError(f"{path}: {key} is neither a string nor an object with a content")
    return value


def _configured_ids(path: Path, key: str) -> list[int]:
    """The ids that a model's config.json gives: a number or a list of numbers."""
    content = load_json(path) if path.exists() else None
    value = content.get(key) if isinstance(content, dict) else None
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) for item in values):
        raise DataError(f"{path}: {key} is {value!r}, not a token id")
    return list(dict.fromkeys(values))
