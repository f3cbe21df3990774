"""tools/serve.py over HTTP, where its libraries are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from megalite.data.tokenizer import BytesTokenizer
from megalite.generation.engine import Engine
from tests.generation.helpers import tiny_run, tiny_stage
from tools.serve import LARGEST_BODY, build_app, main

CONFIG = tiny_run(max_position_embeddings=64)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    pytest.importorskip("starlette", reason="the extra serve is not installed")
    testclient = pytest.importorskip("starlette.testclient", reason="the test client needs httpx", exc_type=Exception)
    engine = Engine(tiny_stage(CONFIG).eval(), CONFIG, BytesTokenizer())
    yield testclient.TestClient(build_app(engine, "tiny", most_tokens=50))
    engine.close()


def completed(client: Any, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_completion(client: Any) -> None:
    body = {"prompt": "ab", "max_tokens": 7, "seed": 3, "n": 2}
    answer = completed(client, **body)
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert [one["index"] for one in answer["choices"]] == [0, 1]
    assert {one["finish_reason"] for one in answer["choices"]} <= {"length", "stop"}
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["total_tokens"] == 2 + answer["usage"]["completion_tokens"]
    assert answer["choices"] == completed(client, **body)["choices"]
    echoed = completed(client, **body, echo=True)["choices"]
    assert [one["text"] for one in echoed] == ["ab" + one["text"] for one in answer["choices"]]


def test_a_stream_is_the_same_text(client: Any) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 20, "seed": 3, "echo": True}
    whole = completed(client, **body)["choices"]
    texts, reasons = ["", ""], ["", ""]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for line in lines:
        choice = json.loads(line)["choices"][0]
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [one["text"] for one in whole]
    assert reasons == [one["finish_reason"] for one in whole]
    assert len(lines) > 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not JSON"),
        (b'{"prompt": "x", "temperature": -1, "what": 2}', "2 settings are wrong"),
        (b'{"prompt": "x", "max_tokens": 51}', "at most 50"),
        (b'{"prompt": "' + b"x" * 60 + b'"}', "reads 64 in all"),
        (b'"' + b"x" * LARGEST_BODY + b'"', "larger than"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
    ],
)
def test_wrong_requests_are_400_with_reasons(client: Any, content: bytes, words: str) -> None:
    answer = client.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_page_and_models(client: Any) -> None:
    assert "<textarea" in client.get("/").text
    assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert client.get("/v1/completions").status_code == 405
    assert client.get("/nothing").status_code == 404


def test_a_missing_library_or_checkpoint_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--load", "/no/such/run"]) in (1, 2)
    message = capsys.readouterr().err
    assert "pip install 'megalite[serve]'" in message or "/no/such/run is not a directory" in message
