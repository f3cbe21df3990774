"""Conversations as token ids, and for every token whether it is part of an answer.

Decisions
- An answer begins and ends between two tokens. Text is encoded as a whole; a border lies between tokens where encoding the text before it
  gives the first tokens of the whole. Where a token would reach over the border, the text is encoded in two parts, as it is when
  the model writes: the prompt is there, and what follows are tokens of their own.
- The second part must go on as it would in the middle of a text. Some tokenizers put a space before whatever they are given; they are given
  something before it which is then taken away. That both parts together are the same text is checked, and refused where they are not.
- Control tokens come from the template alone. Their spellings in a message are refused: a message could end its own turn and begin another.
- Tokenizers without spellings of control tokens (bytes, characters) get one for the end of a document that no text can hold.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megalite.data.chat import Conversation
from megalite.data.chat_template import ChatTemplate, find_template, named_tokens
from megalite.data.tokenizer import Tokenizer, build_tokenizer, tokenizer_kind
from megalite.errors import DataError

__all__ = ["ChatEncoder", "EncodedChat"]

_END_OF_DOCUMENT, _BEGIN_OF_DOCUMENT = "\ufdd2", "\ufdd3"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
_READS_CONTROL_TOKENS = ("hf", "tiktoken")


class EncodedChat(NamedTuple):
    """ids: int32 [tokens]; is_answer: bool [tokens], whether the token is one that the model is to write."""

    ids: np.ndarray
    is_answer: np.ndarray


class ChatEncoder:
    """Encodes conversations with a tokenizer and the chat template that belongs to it, or the one in `template_file`.

    Raises ConfigError and DataError for settings and files that are wrong, as `build_tokenizer` and `ChatTemplate` do.
    """

    def __init__(self, tokenizer_type: str, tokenizer_model: str | None = None, template_file: str | None = None) -> None:
        kind = tokenizer_kind(tokenizer_type)
        mode = "allow" if kind in _READS_CONTROL_TOKENS else "plain"
        self.tokenizer = build_tokenizer(kind, tokenizer_model, special_tokens_in_text=mode, backend="reference")
        tokens = dict(self.tokenizer.control_tokens)
        names = _add_document_tokens(tokens, self.tokenizer)
        names |= named_tokens(kind, tokenizer_model)
        # what the tokenizer itself does not read from text is looked up here
        self._looked_up = {spelling: token for spelling, token in tokens.items() if not self._is_read(spelling, token, mode)}
        self._look_up = re.compile("|".join(["(?!)", *(re.escape(text) for text in sorted(self._looked_up, key=len, reverse=True))]))
        self._control = re.compile("|".join([_RESERVED.pattern, *(re.escape(text) for text in sorted(tokens, key=len, reverse=True))]))
        self.control_tokens, self._control_ids = tokens, frozenset(tokens.values())
        source, name = find_template(kind, tokenizer_model, template_file)
        self.template = ChatTemplate(source, name, names, tuple(tokens))
        self._anchors = ["", *([names["eos_token"]] if names.get("eos_token") else []), "\n"]

    def encode(self, chat: Conversation) -> EncodedChat:
        """Raises DataError, naming where the conversation is from."""
        for number, message in enumerate(chat.messages, 1):
            self._refuse_control_tokens(message, f"{chat.where}: message {number} ({message['role']})")
        text, spans = self.template.text_and_answers(chat)
        try:
            ids, places = self._cut(text, [border for span in spans for border in span])
        except DataError as error:
            raise DataError(f"{chat.where}: {error}") from None
        is_answer = np.zeros(len(ids), dtype=bool)
        for start, stop in zip(places[::2], places[1::2], strict=True):
            is_answer[start:stop] = True
        return EncodedChat(np.array(ids, dtype=np.int32), is_answer)

    def prompt_ids(self, chat: Conversation) -> list[int]:
        """The ids after which the model writes the next answer. Raises DataError."""
        for number, message in enumerate(chat.messages, 1):
            self._refuse_control_tokens(message, f"{chat.where}: message {number} ({message['role']})")
        return self._ids(self.template.render(chat, prompt=True))

    def _cut(self, text: str, borders: Sequence[int]) -> tuple[list[int], list[int]]:
        """Ids of the text, and for every border (ascending) the number of ids before it."""
        whole = self._ids(text)
        places = self._clean_places(text, borders, whole)
        return self._cut_apart(text, borders, whole) if places is None else (whole, places)

    def _clean_places(self, text: str, borders: Sequence[int], whole: list[int]) -> list[int] | None:
        """The numbers where no token reaches over a border; None where one does, or this way cannot tell.

        What stands before a control token has no part in how the text after it is encoded. So only the piece between the last control
        token before a border and the border is encoded again.
        """
        spelled = list(self._control.finditer(text))
        numbers = [number for number, token in enumerate(whole) if token in self._control_ids]
        if [self.control_tokens.get(found.group()) for found in spelled] != [whole[number] for number in numbers]:
            return None
        places, control = [], 0  # control tokens that end before the border
        for border in borders:
            while control < len(spelled) and spelled[control].end() <= border:
                control += 1
            start, first = (0, 0) if control == 0 else (spelled[control - 1].start(), numbers[control - 1])
            head = self._ids(text[start:border])
            if whole[first : first + len(head)] != head:
                return None
            places.append(first + len(head))
        return places

    def _cut_apart(self, text: str, borders: Sequence[int], whole: list[int]) -> tuple[list[int], list[int]]:
        """As `_cut`, from beginnings of the text, and in parts where tokens reach over a border."""
        done: list[int] = []
        rest, base, anchor, places = whole, 0, "", []
        for border in borders:
            head = self._after(anchor, text[base:border])
            if head is None:  # a shorter text can grow together with what the whole one does not
                head = self._ids(text[base:border])
            if rest[: len(head)] != head:
                done = done + head
                anchor, rest = self._continuation(done, text, border, whole)
                base, head = border, []
            places.append(len(done) + len(head))
        return done + rest, places

    def _continuation(self, done: list[int], text: str, border: int, whole: list[int]) -> tuple[str, list[int]]:
        """The text after `border` as ids of their own, and what they were encoded behind."""
        expected = self.tokenizer.decode(whole)
        for anchor in self._anchors:
            rest = self._after(anchor, text[border:])
            if rest is not None and self.tokenizer.decode(done + rest) == expected:
                return anchor, rest
        before, after = text[max(0, border - 20) : border], text[border : border + 20]
        raise DataError(
            f"tokenizer {self.tokenizer.name} cannot encode {after!r} apart from {before!r} before it: "
            "use a chat template in which an answer begins and ends at a control token or a new line"
        )

    def _after(self, anchor: str, text: str) -> list[int] | None:
        """The ids of `text` as it follows `anchor`; None where they grow together."""
        before, ids = self._ids(anchor), self._ids(anchor + text)
        return ids[len(before) :] if ids[: len(before)] == before else None

    def _ids(self, text: str) -> list[int]:
        ids, start = [], 0
        for found in self._look_up.finditer(text):
            ids += self._plain_ids(text[start : found.start()])
            ids.append(self._looked_up[found.group()])
            start = found.end()
        return ids + self._plain_ids(text[start:])

    def _plain_ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text) if text else []

    def _is_read(self, spelling: str, token: int, mode: str) -> bool:
        return mode == "allow" and self.tokenizer.encode(spelling) == [token]

    def _refuse_control_tokens(self, value: object, where: str) -> None:
        if isinstance(value, dict | list):
            for item in value.values() if isinstance(value, dict) else value:
                self._refuse_control_tokens(item, where)
        elif isinstance(value, str) and (found := self._control.search(value)):
            raise DataError(
                f"{where} holds {found.group()!r} at position {found.start()}, which {self.tokenizer.name} reads as a control token: "
                "take it out of the text, only the chat template may write it"
            )


def _add_document_tokens(tokens: dict[str, int], tokenizer: Tokenizer) -> dict[str, str]:
    """Names for the template of the ids that begin and end documents; `tokens` gets a spelling for them where it has none."""
    names = {}
    for name, token, spare in (("eos_token", tokenizer.eod_id, _END_OF_DOCUMENT), ("bos_token", tokenizer.bos_id, _BEGIN_OF_DOCUMENT)):
        if token is not None:
            names[name] = next((spelling for spelling, number in tokens.items() if number == token), spare)
            tokens.setdefault(names[name], token)
    return names
