"""tools/generate.py: text in, text out, one line per error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.generation.helpers import save_stage, tiny_run, tiny_stage
from tools.generate import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_stage(folder, tiny_stage(tiny_run()), tiny_run())
    return folder


def generated(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments), "--device", "cpu"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def failure(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([*map(str, arguments), "--device", "cpu"])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return code, err


def test_continues_the_prompt_the_same_way_for_the_same_seed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--load", saved, "--prompt", "Hallo, ", "--max-new-tokens", 12, "--seed", 3]
    text = generated(capsys, *arguments)
    assert text.startswith("Hallo, ")
    assert text == generated(capsys, *arguments)
    assert text != generated(capsys, *arguments[:-1], 4)


def test_the_prompt_may_come_from_a_file(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Grüße\n", encoding="utf-8")
    common = ["--load", saved, "--max-new-tokens", 5, "--temperature", 0, "--top-k", 0]
    text = generated(capsys, *common, "--prompt-file", file)
    assert text == generated(capsys, *common, "--prompt", "Grüße\n")


def test_requirement_86_several_prompts_and_samples_are_what_they_are_alone(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--load", saved, "--max-new-tokens", 6, "--temperature", 0.9, "--num-samples", 2]
    together = generated(capsys, *common, "--prompt", "ab", "--prompt", "a longer one")
    assert together == generated(capsys, *common, "--prompt", "ab") + generated(capsys, *common, "--prompt", "a longer one")


def test_streaming_prints_the_same(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--load", saved, "--prompt", "ab", "--max-new-tokens", 30, "--top-k", 0, "--temperature", 2]
    assert generated(capsys, *arguments, "--stream") == generated(capsys, *arguments)


@pytest.mark.parametrize("knobs", [["--int8-cache"], ["--dtype", "bf16"], ["--dtype", "bf16", "--int8-cache"]])
def test_memory_knobs(saved: Path, knobs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = generated(capsys, "--load", saved, "--prompt", "ab", "--max-new-tokens", 20, *knobs)
    assert text.startswith("ab")
    assert len(text) > 4


def test_a_hugging_face_folder_is_read_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """This one has 99 ids and no tokenizer, so bytes are too many."""
    folder = ROOT / "tests/golden/hf/qwen3"
    code, message = failure(capsys, "--load", folder, "--prompt", "x")
    assert code == 2
    assert "give --tokenizer-type" in message
    code, message = failure(capsys, "--load", folder, "--prompt", "x", "--tokenizer-type", "bytes")
    assert code == 1
    assert "has 257 ids" in message


def test_ranks_that_were_not_launched_are_said() -> None:
    command = [sys.executable, "tools/generate.py", "--load", "x", "--tp", "2", "--prompt", "a"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=120, check=False)
    assert done.returncode == 2
    assert b"tp 2 x pp 1 needs 2 ranks, 1 were launched: torchrun --nproc-per-node 2" in done.stderr


def save_model_that_says(path: Path, token: int) -> None:
    """The bias of the last norm decides the next token: it is `token`, whatever came before."""
    config = tiny_run(normalization="LayerNorm")
    stage = tiny_stage(config)
    assert stage.head is not None
    assert stage.head.output is not None
    with torch.no_grad():
        stage.head.norm.weight.zero_()
        stage.head.norm.bias.fill_(1.0)
        stage.head.output.weight.zero_()
        stage.head.output.weight[token] = 1.0
    save_stage(path, stage, config)


def test_without_a_prompt_a_document_begins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the end of a document, which is the prompt then, it is "A"."""
    save_model_that_says(tmp_path, ord("A"))
    assert generated(capsys, "--load", tmp_path, "--max-new-tokens", 4, "--temperature", 0) == "AAAA\n"


def test_ends_at_the_end_of_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model_that_says(tmp_path, 256)
    assert generated(capsys, "--load", tmp_path, "--prompt", "end", "--temperature", 0) == "end\n"


def test_a_smaller_tokenizer_is_used_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(vocab_size=300)
    save_stage(tmp_path, tiny_stage(config), config)
    assert main(["--load", str(tmp_path), "--prompt", "x", "--max-new-tokens", "99", "--temperature", "5"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("x")
    assert "has 257 ids, the model has 300" in err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--num-samples", "0"], 2, "num_samples is 0"),
        (["--prompt", "a", "--prompt", "b", "--stream"], 2, "1 in all with --stream"),
        (["--top-p", "0", "--min-p", "2"], 2, "2 settings are wrong: 1. top_p is 0.0"),
        (["--pp", "0"], 2, "pp is 0"),
        (["--temperature", "-1", "--top-k", "-2"], 2, "2 settings are wrong: 1. temperature is -1.0"),
        (["--tokenizer-type", "morse"], 2, "tokenizer type 'morse' is unknown"),
        (["--tokenizer-type", "chars"], 2, "needs its model"),
        (["--tokenizer-type", "hf", "--tokenizer-model", "/no/such/folder"], 1, "/no/such/folder does not exist"),
        (["--prompt-file", "/no/such/file"], 1, "cannot read /no/such/file: No such file"),
        (["--load", "/no/such/run"], 1, "/no/such/run is not a directory"),
    ],
)
def test_errors(saved: Path, arguments: list, code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    got, message = failure(capsys, "--load", saved, *arguments)
    assert got == code
    assert words in message


def test_tokenizer_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_run(vocab_size=200)
    save_stage(tmp_path / "small", tiny_stage(config), config)
    code, message = failure(capsys, "--load", tmp_path / "small", "--prompt", "x")
    assert code == 1
    assert "has 257 ids, the model knows 200" in message
    save_stage(tmp_path / "unnamed", tiny_stage(config), config, tokenizer_type=None)
    code, message = failure(capsys, "--load", tmp_path / "unnamed", "--prompt", "x")
    assert code == 2
    assert "give --tokenizer-type" in message


def test_as_a_program(saved: Path) -> None:
    command = [sys.executable, "-W", "error", "tools/generate.py", "--load", saved, "--prompt", "abc"]
    done = subprocess.run(
        [*map(str, command), "--max-new-tokens", "3"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"abc")
    assert done.stderr == b""
