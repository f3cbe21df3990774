"""From text to the model's tokens, and from tokens that come one at a time to text that can be shown at once.

Decisions
- A piece is held back while it ends in the middle of a character, or in what may be the beginning of a stop string.
- Only the newest tokens are decoded again, from the last place where a piece was complete: some tokenizers decode a token differently
  after another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalite.config import RunConfig
from megalite.data.tokenizer import Tokenizer, build_tokenizer
from megalite.errors import ConfigError, DataError
from megalite.log import get_logger

__all__ = ["TextStream", "load_tokenizer", "prompt_ids"]

_HALF = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """decode: ids -> text. stops: strings at whose first occurrence the text ends, without it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._shown = self._read = 0  # tokens from `shown` give the context of those from `read`
        self._held = ""
        self.is_stopped = False

    def add(self, token: int) -> str:
        """What can be shown now; after a stop string nothing more."""
        if self.is_stopped:
            return ""
        self._ids.append(token)
        before, text = self._decode(self._ids[self._shown : self._read]), self._decode(self._ids[self._shown :])
        if text.endswith(_HALF):
            return ""
        self._shown, self._read = self._read, len(self._ids)
        return self._release(text[len(before) :])

    def finish(self) -> str:
        """What was held back, half characters included."""
        if self.is_stopped:
            return ""
        before, text = self._decode(self._ids[self._shown : self._read]), self._decode(self._ids[self._shown :])
        self._shown = self._read = len(self._ids)
        piece = self._release(text[len(before) :])
        held, self._held = self._held, ""
        return piece + ("" if self.is_stopped else held)

    def _release(self, piece: str) -> str:
        text = self._held + piece
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self.is_stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((length for length in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:length])), 0)


def load_tokenizer(config: RunConfig, kind: str | None = None, model: str | None = None) -> Tokenizer:
    """The tokenizer of this kind and file, else the one that the run names. Raises ConfigError where there is none, DataError where it has
    more ids than the model."""
    found = kind or config.data.tokenizer_type
    if found is None:
        raise ConfigError("the run names no tokenizer: give --tokenizer-type, and --tokenizer-model unless it is bytes")
    tokenizer = build_tokenizer(found, model or (config.data.tokenizer_model if kind is None else None))
    if tokenizer.vocab_size > config.model.known_vocab_size:
        raise DataError(
            f"tokenizer {tokenizer.name} has {tokenizer.vocab_size} ids, the model knows {config.model.vocab_size}: "
            "give the tokenizer that it was trained with (--tokenizer-type, --tokenizer-model)"
        )
    if tokenizer.vocab_size < config.model.known_vocab_size:
        sizes = f"{tokenizer.vocab_size} ids, the model has {config.model.vocab_size}"
        get_logger().warning(f"tokenizer {tokenizer.name} has {sizes}: the text is only right if those are spare rows")
    return tokenizer


def prompt_ids(prompt: str, tokenizer: Tokenizer) -> list[int]:
    """The prompt's ids, never none: a model that begins a document has just seen the end of the one before."""
    if prompt:
        return tokenizer.encode(prompt)
    if tokenizer.eod_id is None:
        raise ConfigError(f"{tokenizer.name} has no end-of-document token to begin a document after: give --prompt")
    return [tokenizer.eod_id]
