"""A faster engine for Hugging Face BPE tokenizers: the optional package `fastokens` (extra `fast`).

It reads the same tokenizer.json and gives the same ids many times faster, in one flat array. It is another program all the
same, so it is used for BPE models alone (tests hold its ids equal to those of `tokenizers` for their kinds), and each loaded
tokenizer is tried on difficult texts first: one different id, and the reference library does the work, with a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from megalite.data.tokenizer import FlatIds
from megalite.log import get_logger

__all__ = ["HARD_TEXTS", "FastBackend", "fast_backend"]

_log = get_logger(__name__)

# Texts on which engines that differ are known to differ: spaces, line ends, contractions, digits, scripts, combining marks.
HARD_TEXTS = (
    "",
    " ",
    "   a  b \t\tc\n\n\n d\r\n \r e \u00a0\u2003f\u3000g ",
    "don't DON'T we'll WE'LL 's'S'\u017f I'm \u2019tis",
    "0 12 123 1234 12345678 3.14e-10 0xFF \u0665\u096b \u2167 \u00b2 \u2460",
    "def f(x):\n    return {'a': [1, 2]}  # \u00e9\n\n\nif __name__ == '__main__':\n\tf(0)\n",
    "\u00e9 e\u0301 \u0301x \u0e4d \u1e9b\u0323 \ufb01 \uff21 \u212b \u0130 \u0131 \u00df \u01c5",
    "\u4e2d\u6587\u5b57\u7b26\u3002 \u65e5\u672c\u8a9e\u30c6\u30ad\u30b9\u30c8 \ud55c\uad6d\uc5b4"
    " \u0440\u0443\u0441\u0441\u043a\u0438\u0439 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0010ffff \ue000 \ufffd \ufeff",
    "a\u2028b\u2029c\x85d\x0be\x0cf\x00g\x1fh\x7fi\u200bj",
    "<s></s> <|endoftext|><|im_start|>[EOS] <unk>\u2581\u2581x \u2581",
    "x" * 300 + " " * 300 + "\n" * 50 + "-=" * 100 + "!?" * 40,
)


class FastBackend:
    """The ids of one tokenizer from fastokens; `plain` texts hold no control tokens."""

    name = "fastokens"

    def __init__(self, engine: Any, plain: bool) -> None:
        self._engine = engine
        self._plain = plain

    def encode_flat(self, texts: Sequence[str]) -> FlatIds:
        """The ids of all texts in one array; the texts must have a UTF-8 form."""
        ids, ends = self._engine.encode_batch_flat(list(texts), False, self._plain)
        return FlatIds(np.frombuffer(ids, dtype="<u4").astype(np.int32), np.diff(np.frombuffer(ends, dtype="<u8")).astype(np.int64))


def fast_backend(reference: Any, allow_special: bool) -> FastBackend | None:
    """The fast engine of a `tokenizers.Tokenizer` (without truncation and padding), or None where the reference must do the work."""
    try:
        from fastokens import Tokenizer as Engine
    except ImportError:
        return None
    content = reference.to_str()
    model = orjson.loads(content)["model"]
    if model["type"] != "BPE" or model.get("dropout"):
        return None
    try:
        fast = FastBackend(Engine.from_json_str(content), plain=not allow_special)
    except ValueError:  # a kind of tokenizer that the engine does not know
        return None
    specials = [added.content for added in reference.get_added_tokens_decoder().values()]
    texts = [*HARD_TEXTS, *(f"a{special} {special}b" for special in specials[:100])]
    encoded = [encoding.ids for encoding in reference.encode_batch_fast(texts, add_special_tokens=False)]
    ids, lengths = fast.encode_flat(texts)
    if lengths.tolist() != [len(ids) for ids in encoded] or ids.tolist() != [token for ids in encoded for token in ids]:
        _log.warning("fastokens gives other ids than tokenizers for this tokenizer; the slower reference library is used")
        return None
    return fast
