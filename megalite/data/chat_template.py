"""Chat templates: from a conversation to text, and which part of that text the model is to learn.

Decisions
- A template is Jinja, run as transformers runs it: in the immutable sandbox, with `raise_exception`, `tojson` that keeps letters, loop
  controls, `{% generation %}` blocks, and the tokenizer's `bos_token`, `eos_token`, ... There is no `strftime_now`: the text of a sample
  must not depend on the day it is read, and templates that ask whether it exists then take a fixed date.
- Which template: the file that is named; else the tokenizer's own (chat_template.jinja, tokenizer_config.json or chat_template.json in its
  folder, of several the one called "default"); else `DEFAULT_TEMPLATE`, `role: content` on a line each and the end-of-document token after
  an answer.
- An answer is what the model would have to write: from the end of the generation prompt of the messages before it to its last control
  token (its end of turn), or where the template has none to the end of its rendering. Both ends are found by rendering beginnings of the
  conversation, and are only used where these are beginnings of the whole text. `{% generation %}` blocks say it outright and go first.
- Some templates write an earlier answer in another way than the last one (without its reasoning). Such an answer ends at the first control
  token after its beginning. A template whose beginnings cannot be found at all is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.data.chat import ASSISTANT, Conversation
from megalite.data.tokenizer_files import load_json
from megalite.errors import ConfigError, DataError

__all__ = ["DEFAULT_TEMPLATE", "ChatTemplate", "find_template", "named_tokens"]

DEFAULT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Unicode sets these aside for use inside a program, so no text has them.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_HAS_MARKS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_INSTALL = "chat templates need the jinja2 package: pip install 'megalite[finetune]'"

Span = tuple[int, int]


class ChatTemplate:
    """source: the template; name: where it is from, for messages; tokens: `eos_token` and others that it may use;
    control: spellings of control tokens, of which one ends an answer. Raises DataError for a source that is no template.
    """

    def __init__(self, source: str, name: str, tokens: Mapping[str, str], control: tuple[str, ...] = ()) -> None:
        self.name, self._tokens = name, {"bos_token": "", "eos_token": "", **tokens}
        self._has_marks = bool(_HAS_MARKS.search(source))
        self._control = re.compile("|".join(map(re.escape, sorted(control, key=len, reverse=True)))) if control else None
        self._template = _compile(source, name)

    def render(self, chat: Conversation, num_messages: int | None = None, *, prompt: bool = False) -> str:
        """The text of the first `num_messages` messages (None: all), with `prompt` up to where an answer begins. Raises DataError."""
        return self._render(chat, num_messages, prompt).replace(_BEGIN, "").replace(_END, "")

    def text_and_answers(self, chat: Conversation) -> tuple[str, list[Span]]:
        """The whole text, and the places [start, stop) of all that is learned in it, in order. Raises DataError."""
        marked = self._render(chat, None, prompt=False)
        if self._has_marks:
            return _without_marks(marked, chat, self.name)
        spans = [self._answer(chat, marked, number) for number, is_learned in enumerate(chat.is_learned) if is_learned]
        return marked, spans

    def _render(self, chat: Conversation, num_messages: int | None, prompt: bool) -> str:
        from jinja2 import TemplateError

        messages, tools = chat.messages[:num_messages], chat.tools or None
        try:
            return self._template.render(messages=messages, tools=tools, documents=None, add_generation_prompt=prompt, **self._tokens)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise DataError(f"{chat.where}: chat template {self.name}: {error}") from None

    def _answer(self, chat: Conversation, text: str, number: int) -> Span:
        """Where message `number`, an answer, lies in the whole text."""
        before, through = self.render(chat, number, prompt=True), self.render(chat, number + 1)
        if not text.startswith(before) or len(before) >= len(text):
            raise DataError(
                f"{chat.where}: chat template {self.name}: the generation prompt before message {number + 1} is no beginning of the "
                "conversation, so it cannot be told what the model is to write there; use a template with {% generation %} blocks"
            )
        start = len(before)
        if text.startswith(through) and len(through) > start:
            ends = [] if self._control is None else [found.end() for found in self._control.finditer(text, start, len(through))]
            return start, ends[-1] if ends else len(through)
        found = None if self._control is None else self._control.search(text, start)
        if found is None:
            raise DataError(
                f"{chat.where}: chat template {self.name}: message {number + 1} is written otherwise at the end than in the middle of a "
                "conversation, and no control token ends it; use a template with {% generation %} blocks"
            )
        return start, found.end()


def find_template(tokenizer_kind: str | None, tokenizer_model: str | None, file: str | None = None) -> tuple[str, str]:
    """Source and name of the template: of `file`, of the tokenizer, or the default one. Raises DataError for unreadable files."""
    if file is not None:
        return _read_template(Path(file)) or "", file
    if tokenizer_kind == "hf" and tokenizer_model is not None:
        path = Path(tokenizer_model)
        folder = path if path.is_dir() else path.parent
        for name in ("chat_template.jinja", "tokenizer_config.json", "chat_template.json"):
            if (folder / name).is_file() and (source := _read_template(folder / name, may_lack=True)) is not None:
                return source, str(folder / name)
    return DEFAULT_TEMPLATE, "default (role: content)"


def named_tokens(tokenizer_kind: str, tokenizer_model: str | None) -> dict[str, str]:
    """The spellings that the files of a Hugging Face tokenizer give names (`pad_token`, ...); none for others."""
    if tokenizer_kind != "hf" or tokenizer_model is None:
        return {}
    path, found = Path(tokenizer_model), {}
    folder = path if path.is_dir() else path.parent
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        content = load_json(folder / name) if (folder / name).is_file() else {}
        for key, value in content.items() if isinstance(content, dict) else ():
            spelling = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(spelling, str):
                found[key] = spelling
    return found


def _read_template(path: Path, may_lack: bool = False) -> str | None:
    if path.suffix != ".json":
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"cannot read the chat template {path}: {error}") from None
    content = load_json(path)
    template = content.get("chat_template") if isinstance(content, dict) else None
    if isinstance(template, list):
        template = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}.get("default")
    if not isinstance(template, str) and not (template is None and may_lack):
        raise DataError(f"{path} has no chat_template that is a text, or a list with one called default")
    return template


def _compile(source: str, name: str) -> Any:
    try:
        from jinja2 import TemplateError, TemplateSyntaxError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ConfigError(_INSTALL) from None

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_mark_extension(), loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = raise_exception
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise DataError(f"chat template {name}, line {error.lineno}: {error.message}") from None


def _mark_extension() -> Any:
    """A block whose text comes out between marks."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    return Generation


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:  # not Jinja's own, which replaces letters that HTML has a use for
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _without_marks(marked: str, chat: Conversation, name: str) -> tuple[str, list[Span]]:
    """The text, and what was between marks and is learned."""
    text, spans = "", []
    for number, piece in enumerate(re.split(f"{_BEGIN}|{_END}", marked)):
        if number % 2:
            spans.append((len(text), len(text) + len(piece)))
        text += piece
    learned = [is_learned for message, is_learned in zip(chat.messages, chat.is_learned, strict=True) if message["role"] == ASSISTANT]
    if len(spans) != len(learned) and not (spans and all(learned)):
        raise DataError(f"{chat.where}: chat template {name} marks {len(spans)} answers of {len(learned)}")
    if len(spans) == len(learned):
        spans = [span for span, is_learned in zip(spans, learned, strict=True) if is_learned]
    return text, [span for span in spans if span[1] > span[0]]
