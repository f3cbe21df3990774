"""The tokenizers that read one model file: a list of characters, and a SentencePiece model.

Decisions. The character file is a JSON list, so it can be read and edited; its EOD is the id after the last
character. A SentencePiece model's own normalizer can lose newlines or repeated spaces; that is the model's business
and is only reported (`find_losses`), because changing it would change its ids. SentencePiece never reads control
tokens out of a text, so their spellings are plain text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from megalite.data.sentencepiece_words import WordEncoder, word_encoder
from megalite.data.tokenizer import FlatIds, check_ids, flatten, utf8_bytes
from megalite.errors import DataError

__all__ = ["CharsTokenizer", "SentencePieceTokenizer", "load_json"]


class CharsTokenizer:
    """One id per character of a fixed list, in the list's order; EOD is the id after them."""

    bos_id: int | None = None
    special_strings: tuple[str, ...] = ()
    backend = "reference"

    def __init__(self, path: Path) -> None:
        characters = load_json(path)
        if not isinstance(characters, list) or not all(isinstance(item, str) and len(item) == 1 for item in characters):
            raise DataError(f"{path} is no character list: it must be a JSON list of one-character strings")
        if not characters or len(set(characters)) != len(characters):
            raise DataError(
                f"{path} lists {len(characters)} characters, of which {len(set(characters))} are different; each must be there once"
            )
        self.name = f"chars:{path.name}"
        self._characters: list[str] = characters
        self._ids = {character: index for index, character in enumerate(characters)}
        self.eod_id: int | None = len(characters)
        self.vocab_size = len(characters) + 1
        self.control_tokens: dict[str, int] = {}

    def encode(self, text: str) -> list[int]:
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise DataError(
                f"character {character!r} (U+{ord(character):04X}) at position {text.index(character)} is not among "
                f"the {len(self._characters)} characters of {self.name}; train the tokenizer on a text that has it"
            ) from None

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        return flatten(self.encode_batch(texts))

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self)
        return "".join(self._characters[token] for token in ids if token != self.eod_id)


class SentencePieceTokenizer:
    """A SentencePiece `.model` file. EOD is the model's eos, BOS its bos; both may be missing."""

    def __init__(self, path: Path, eod_token: str | None = None, use_fast: bool = True) -> None:
        import sentencepiece

        try:
            processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            raise DataError(f"{path} is no SentencePiece model: {error}") from None
        self.name = f"sentencepiece:{path.name}"
        self._processor = processor
        self.vocab_size = int(processor.get_piece_size())
        self.bos_id: int | None = _known(processor.bos_id())
        self.eod_id: int | None = _known(processor.eos_id()) if eod_token is None else self._find(eod_token)
        self._control = {token for token in range(self.vocab_size) if processor.is_control(token)}
        self.special_strings: tuple[str, ...] = tuple(processor.id_to_piece(token) for token in sorted(self._control))
        self.control_tokens = {processor.id_to_piece(token): token for token in self._control}
        self._words: WordEncoder | None = word_encoder(processor) if use_fast else None
        self.backend = "reference" if self._words is None else self._words.name

    def _find(self, piece: str) -> int:
        token = int(self._processor.piece_to_id(piece))
        if self._processor.id_to_piece(token) != piece:  # SentencePiece answers with the unknown id
            raise DataError(f"{self.name} has no piece {piece!r}, so it cannot be the end-of-document token")
        return token

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            utf8_bytes(text)
        return self._processor.encode(list(texts), out_type=int, num_threads=1)

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        if self._words is None:
            return flatten(self.encode_batch(texts))
        for text in texts:
            utf8_bytes(text)
        return self._words.encode_flat(texts)

    def decode(self, ids: Sequence[int]) -> str:
        check_ids(ids, self)
        return self._processor.decode([int(token) for token in ids if token not in self._control])


def _known(token: int) -> int | None:
    """SentencePiece says -1 for a token that the model does not have."""
    return int(token) if token >= 0 else None


def load_json(path: Path) -> object:
    """The content of a JSON file; raises DataError naming the file."""
    try:
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is no valid JSON: {error.msg} (line {error.lineno}, column {error.colno})") from None
