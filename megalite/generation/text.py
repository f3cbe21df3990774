"""From tokens that come one at a time to text that can be shown at once.

Decisions
- A piece is held back while it ends in the middle of a character, or in what may be the beginning of a stop string.
- Only the newest tokens are decoded again, from the last place where a piece was complete: some tokenizers decode a token differently
  after another one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

__all__ = ["TextStream"]

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
