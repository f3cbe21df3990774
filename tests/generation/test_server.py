"""What the completion server refuses, and what it tells of a request, without a web server."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megalite.data.tokenizer import BytesTokenizer
from megalite.errors import ConfigError
from megalite.generation import Sampling, generate_batch
from megalite.generation.engine import Engine, Event, QueueFullError
from megalite.generation.page import PAGE
from megalite.generation.request import CompletionRequest, parse_request
from tests.generation.helpers import tiny_run, tiny_stage

CONFIG = tiny_run(max_position_embeddings=64)


def parsed(**body: Any) -> CompletionRequest:
    return parse_request(body, most_tokens=100, most_rows=4)


def test_defaults_are_those_of_the_original() -> None:
    request = parsed(prompt="x", model="any", user="me", logprobs=None, presence_penalty=0, best_of=1)
    assert request.prompts == ["x"]
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.top_p) == (16, 1.0, None)
    assert (request.num_samples, request.stops, request.stream, request.echo) == (1, [], False, False)
    assert parsed(prompt="x").sampling.seed != parsed(prompt="x").sampling.seed


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: Any) -> None:
    assert parsed(prompt=prompt).prompts == prompts


def test_samples_have_seeds_of_their_own() -> None:
    request = parsed(prompt=["a", "b"], n=2, seed=7, stop="x", top_k=0)
    assert (request.num_rows, request.seeds, request.stops, request.sampling.top_k) == (4, [7, 8, 7, 8], ["x"], None)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "prompt must be"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": [[]]}, "prompt must be"),
        ({"prompt": [True]}, "prompt must be"),
        ({"prompt": ["a", 1]}, "prompt must be"),
        ({"prompt": "x", "max_token": 3}, "max_token is not a field"),
        ({"prompt": "x", "logprobs": 3}, "logprobs is not supported"),
        ({"prompt": "x", "presence_penalty": 0.5}, "presence_penalty is not supported"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens is 0"),
        ({"prompt": "x", "max_tokens": 101}, "at most 100"),
        ({"prompt": "x", "max_tokens": "3"}, "max_tokens is '3', it must be int"),
        ({"prompt": "x", "max_tokens": True}, "max_tokens is True"),
        ({"prompt": "x", "stream": 1}, "stream is 1, it must be bool"),
        ({"prompt": "x", "temperature": -1}, "temperature is -1"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "x", "top_p": 0}, "top_p is 0"),
        ({"prompt": "x", "seed": -1}, "seed is -1"),
        ({"prompt": "x", "n": 0}, "n is 0"),
        ({"prompt": ["x"] * 3, "n": 2}, "n is 2 for 3 prompts"),
        ({"prompt": "x", "stop": ""}, "stop must be"),
        ({"prompt": "x", "stop": [1]}, "stop must be"),
    ],
)
def test_what_is_wrong_is_said(body: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parsed(**body)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="4 settings are wrong") as caught:
        parsed(prompt=3, temprature=1, top_p=2, max_tokens=0)
    assert len(caught.value.violations) == 4
    with pytest.raises(ConfigError, match="must be a JSON object"):
        parse_request([1], most_tokens=1, most_rows=1)


class Client:
    """Collects the events of one request."""

    def __init__(self, engine: Engine, **body: Any) -> None:
        self.events: list[Event] = []
        self.is_over = threading.Event()
        self.job = engine.prepare(parsed(**body), self.hear)
        self.left = len(self.job.rows)

    def hear(self, event: Event) -> None:
        self.events.append(event)
        self.left -= event.finish is not None
        if self.left == 0 or event.row < 0:
            self.is_over.set()

    def text(self, row: int) -> str:
        assert self.is_over.wait(60)
        return "".join(event.text for event in self.events if event.row == row)


@pytest.fixture
def engine() -> Any:
    engine = Engine(tiny_stage(CONFIG).eval(), CONFIG, BytesTokenizer(), most_waiting=2)
    yield engine
    engine.close()


def test_a_request_is_what_generation_gives(engine: Engine) -> None:
    client = Client(engine, prompt=["ab", "cdef"], n=2, seed=3, max_tokens=9)
    engine.submit(client.job)
    rows = [list(b"ab")] * 2 + [list(b"cdef")] * 2
    wanted = generate_batch(tiny_stage(CONFIG).eval(), rows, Sampling(max_new_tokens=9), seeds=[3, 4, 3, 4], stop_id=256, vocab_size=257)
    assert [client.text(row) for row in range(4)] == [BytesTokenizer().decode(ids) for ids in wanted]
    finished = {event.row: event.finish for event in client.events if event.finish}
    assert finished == {row: "length" if len(ids) == 9 else "stop" for row, ids in enumerate(wanted)}
    assert client.job.num_new == sum(map(len, wanted))


def test_what_the_model_cannot_read_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="max_tokens is 60: this model reads 64 in all"):
        Client(engine, prompt="abcdef", max_tokens=60)
    with pytest.raises(ConfigError, match="holds token 257, the vocabulary ends at 256"):
        Client(engine, prompt=[3, 257])


def test_a_full_queue_refuses_and_a_client_that_left_costs_nothing(engine: Engine) -> None:
    gate, begun = threading.Event(), threading.Event()
    first = Client(engine, prompt="ab", max_tokens=50, temperature=0)
    hear = first.job.emit

    def slow(event: Event) -> None:
        begun.set()
        assert gate.wait(60)
        hear(event)

    first.job.emit = slow
    engine.submit(first.job)
    assert begun.wait(60)
    waiting = [Client(engine, prompt="ab", max_tokens=3) for _ in range(3)]
    engine.submit(waiting[0].job)
    engine.submit(waiting[1].job)
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        engine.submit(waiting[2].job)
    waiting[0].job.is_cancelled.set()
    first.job.is_cancelled.set()
    gate.set()
    waiting[1].text(0)
    assert first.job.num_new < 50, "it ended at the next token"
    assert waiting[0].events == []


def test_a_failure_is_told_and_the_next_request_is_served(engine: Engine) -> None:
    client, after = Client(engine, prompt="ab"), Client(engine, prompt="ab", max_tokens=2)
    client.job.rows[0] = []
    engine.submit(client.job)
    engine.submit(after.job)
    assert "the prompt has no tokens" in client.text(-1)
    after.text(0)
    assert [event.finish for event in after.events if event.finish] in (["length"], ["stop"])


def test_the_page_loads_nothing_from_elsewhere() -> None:
    assert "://" not in PAGE
    assert "v1/completions" in PAGE
