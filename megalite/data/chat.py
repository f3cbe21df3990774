"""Conversations from JSON lines, in the three forms that instruct data comes in.

| record | becomes |
|---|---|
| `{"messages": [{"role": ..., "content": ...}, ...]}`, perhaps with `"tools": [...]` | itself |
| `{"prompt": ..., "completion": ...}` | a user's message and the assistant's |
| `{"instruction": ..., "output": ...}`, perhaps with `"input"`, `"system"` | the same; the input is its own paragraph of the question |

Decisions
- A record that cannot be learned from ends the run with file and line: a data set that lost its bad lines in silence cannot be told
  from a good one. Lines of white space are no records.
- `messages` goes before the other forms, as some data sets repeat their first message as `prompt`. Other keys of a record are notes
  about it and stay unread; other keys of a message go to the chat template, which may know them (tool_calls, reasoning_content).
- What is learned are the assistant's messages; those with `"weight": 0` are only read, as in OpenAI's fine-tuning format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from megalite.data.documents import find_sources, read_chunks
from megalite.errors import DataError

__all__ = ["ASSISTANT", "Conversation", "check_messages", "parse_conversation", "read_chat"]

ASSISTANT = "assistant"
_CHUNK_BYTES = 1 << 20
_JSON_SPACE = b" \t\r\n"
_FORMS = '{"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...} or {"instruction": ..., "output": ...}'


@dataclass(frozen=True)
class Conversation:
    """Messages with role and content, in order. is_learned: of each message; where: "FILE:LINE", for messages to people."""

    messages: list[dict[str, Any]]
    is_learned: list[bool]
    where: str = "conversation"
    tools: list[dict[str, Any]] = field(default_factory=list)


def read_chat(path: str) -> Iterator[Conversation]:
    """The conversations of a .jsonl file (also .gz or .zst) in its order.

    Raises DataError with file and line for the first record that is none, and for a file without any.
    """
    num_conversations = 0
    (source, *more) = find_sources([path])
    if more or not source.is_json_lines:
        raise DataError(f"instruct data {path} must be one file of JSON lines (.jsonl)")
    for chunk in read_chunks([source], None, _CHUNK_BYTES, None):
        for index, raw in enumerate(chunk.records):
            if raw.strip(_JSON_SPACE):
                num_conversations += 1
                yield parse_conversation(raw, chunk.where(index))
    if num_conversations == 0:
        raise DataError(f"{path} holds no conversation; each line must be one: {_FORMS}")


def parse_conversation(raw: bytes, where: str) -> Conversation:
    """The conversation of one line. Raises DataError that begins with `where`."""
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: invalid JSON: {error.msg} (column {error.colno})") from None
    try:
        messages, tools = _messages_of(record)
        is_learned = check_messages(messages)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None
    plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
    return Conversation(plain, is_learned, where, tools)


def check_messages(messages: object) -> list[bool]:
    """Which messages are learned. Raises DataError for what is no conversation, or has no answer to learn."""
    if not isinstance(messages, list) or not messages:
        raise DataError("messages must be a list of at least one message")
    is_learned = [_is_learned(message, number) for number, message in enumerate(messages, 1)]
    if not any(is_learned):
        raise DataError(f'there is no message of the role "{ASSISTANT}" to learn')
    return is_learned


def _messages_of(record: object) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if not isinstance(record, dict):
        raise DataError(f"the record is no object; it must be {_FORMS}")
    if "messages" in record:
        tools = record.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise DataError("tools must be a list of objects")
        return record["messages"], tools
    pairs = [pair for pair in (("prompt", "completion"), ("instruction", "output")) if set(pair) <= record.keys()]
    if len(pairs) != 1:
        present = ", ".join(map(repr, record)) or "none"
        raise DataError(f"the keys are {present}; the record must be {'only one of ' if pairs else ''}{_FORMS}")
    ((question, answer),) = pairs
    asked = _text(record, question)
    if question == "instruction" and record.get("input"):
        asked += "\n\n" + _text(record, "input")
    messages = [{"role": "user", "content": asked}, {"role": ASSISTANT, "content": _text(record, answer)}]
    if question == "instruction" and record.get("system"):
        messages.insert(0, {"role": "system", "content": _text(record, "system")})
    return messages, []


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str) or not record[key]:
        raise DataError(f"{key!r} must be a text that is not empty")
    return record[key]


def _is_learned(message: object, number: int) -> bool:
    if not isinstance(message, dict):
        raise DataError(f"message {number} is no object with role and content")
    role, content, weight = message.get("role"), message.get("content"), message.get("weight", 1)
    if not isinstance(role, str) or not role:
        raise DataError(f"message {number} has no role; it must be a text such as user or {ASSISTANT}")
    calls = bool(message.get("tool_calls"))
    if not isinstance(content, str) and not (content is None and calls):
        raise DataError(f"message {number} ({role}) has no text as its content")
    if role == ASSISTANT and not content and not calls:
        raise DataError(f"message {number} is an empty answer; take it out, or the whole conversation")
    if weight not in (0, 1) or ("weight" in message and role != ASSISTANT):
        raise DataError(f"message {number} ({role}) has weight {weight!r}; only answers have one, 0 (only read) or 1 (learned)")
    return role == ASSISTANT and weight == 1
