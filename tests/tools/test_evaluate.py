"""tools/evaluate.py: perplexity of texts, token files and answers; one line of JSON, one line per error."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.data.chat import read_chat
from megalite.data.chat_encoding import ChatEncoder
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizer import TokenizerSpec
from tests.generation.helpers import SEQ_LENGTH, plain_logits, save_stage, tiny_run, tiny_stage
from tools.evaluate import main

ROOT = Path(__file__).resolve().parents[2]
EOD = 256
TEXT = "Größe und Maß, 29 bytes."


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_stage(folder, tiny_stage(tiny_run()), tiny_run())
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    assert main([*map(str, arguments), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "perplexity" in out.splitlines()[0]
    return json.loads(out.splitlines()[-1])


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([*map(str, arguments), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return code, err


def losses(ids: list[int], context: int = SEQ_LENGTH) -> list[float]:
    """Of every token but the first, in windows that do not overlap."""
    stage, found = tiny_stage(tiny_run()).eval(), []
    for place in range(1, len(ids)):
        start = (place - 1) // context * context
        found.append(-float(torch.log_softmax(plain_logits(stage, ids[start:place]).double(), dim=-1)[ids[place]]))
    return found


def test_a_text(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    ids = list(TEXT.encode())
    expected = losses([EOD, *ids])
    found = evaluated(capsys, "--load", saved, "--text", file)
    assert found["perplexity"] == pytest.approx(math.exp(sum(expected) / len(ids)), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(sum(expected) / math.log(2) / len(ids), rel=1e-5)
    assert (found["tokens"], found["bytes"], found["windows"]) == (len(ids), len(ids), math.ceil(len(ids) / SEQ_LENGTH))
    assert (found["context"], found["stride"]) == (SEQ_LENGTH, SEQ_LENGTH)
    short = evaluated(capsys, "--load", saved, "--text", file, "--context", 4, "--first-token", "none")
    assert short["loss"] == pytest.approx(sum(losses(ids, 4)) / (len(ids) - 1), rel=1e-5)
    assert short["bits_per_byte"] is None
    sliding = evaluated(capsys, "--load", saved, "--text", file, "--stride", 1, "--batch-size", 5)
    assert sliding["tokens"] == len(ids)
    assert sliding["loss"] != pytest.approx(found["loss"], rel=1e-3)


def test_lines_of_json_are_documents_by_themselves(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"body": "abc"}\n\n{"body": "d"}\n')
    expected = losses([EOD, *b"abc"]) + losses([EOD, *b"d"])
    found = evaluated(capsys, "--load", saved, "--text", file, "--json-key", "body")
    assert found["loss"] == pytest.approx(sum(expected) / 4, rel=1e-5)
    code, message = failure(capsys, "--load", saved, "--text", file)
    assert code == 1
    assert f"{file}:1: the key 'text' is missing" in message


def test_token_files(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "abcdefghij"}\n{"text": "klm"}\n')
    inputs, prefix = (str(tmp_path / "in.jsonl"),), str(tmp_path / "out")
    preprocess(PreprocessOptions(inputs=inputs, output_prefix=prefix, tokenizer=TokenizerSpec("bytes"), append_eod=True))
    one, two = [*b"abcdefghij", EOD], [*b"klm", EOD]
    common = ["--load", saved, "--data-path", tmp_path / "out_text_document"]
    joined = evaluated(capsys, *common)
    assert joined["loss"] == pytest.approx(sum(losses([EOD, *one, *two])) / 15, rel=1e-5)
    assert (joined["tokens"], joined["bytes"]) == (15, 13)
    apart = evaluated(capsys, *common, "--per-document")
    assert apart["loss"] == pytest.approx((sum(losses([EOD, *one])) + sum(losses([EOD, *two]))) / 15, rel=1e-5)
    assert apart["bytes"] == 13


def test_answers_of_conversations(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_text('{"prompt": "a?", "completion": "bc"}\n{"prompt": "d", "completion": "e"}\n')
    expected = []
    for chat in read_chat(str(file)):
        encoded = ChatEncoder("bytes").encode(chat)
        everything = losses(encoded.ids.tolist())
        expected += [loss for loss, counts in zip(everything, encoded.is_answer[1:], strict=True) if counts]
    found = evaluated(capsys, "--load", saved, "--chat", file)
    assert found["tokens"] == len(expected) == 7
    assert found["loss"] == pytest.approx(sum(expected) / 7, rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--text", "/no/such/file.txt"], 1, "/no/such/file.txt does not exist"),
        (["--data-path", "/no/such/prefix"], 1, "cannot read /no/such/prefix.idx"),
        (["--text", "EMPTY"], 1, "no token to predict"),
        (["--text", "EMPTY", "--context", "12"], 2, "the model reads 11 tokens at once"),
        (["--text", "EMPTY", "--context", "5", "--stride", "0"], 2, "stride must be from 1 to context"),
        (["--text", "EMPTY", "--first-token", "bos"], 2, "the tokenizer has no bos token"),
        (["--text", "EMPTY", "--batch-size", "0"], 2, "batch_size is 0"),
        (["--text", "EMPTY", "--tp", "0"], 2, "tp is 0"),
        (["--text", "EMPTY", "--tokenizer-type", "morse"], 2, "tokenizer type 'morse' is unknown"),
    ],
)
def test_errors(saved: Path, tmp_path: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    got, message = failure(capsys, "--load", saved, *(str(empty) if text == "EMPTY" else text for text in arguments))
    assert got == code
    assert words in message


def test_tasks_without_the_harness(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.evaluate.find_spec", lambda name: None)
    code, message = failure(capsys, "--load", "x", "--tasks", "lambada_openai")
    assert code == 2
    assert "pip install 'megalite[lm-eval]'" in message


def test_ranks_that_were_not_launched_are_said() -> None:
    command = [sys.executable, "tools/evaluate.py", "--load", "x", "--tp", "2", "--text", "a.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 2
    assert b"tp 2 x pp 1 needs 2 ranks, 1 were launched: torchrun --nproc-per-node 2" in done.stderr
