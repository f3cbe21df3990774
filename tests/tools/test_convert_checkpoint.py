"""tools/convert_checkpoint.py from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.convert_checkpoint import main

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


def test_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--from", "hf", "--to", "megalite", "--input", str(GOLDEN / "qwen3"), "--output", str(tmp_path / "ours")]
    back = ["--from", "megalite", "--to", "hf", "--input", str(tmp_path / "ours"), "--output", str(tmp_path / "theirs")]
    assert main(there) == main(back) == 0
    assert (tmp_path / "theirs" / "model.safetensors").read_bytes()
    assert (tmp_path / "ours" / "config.toml").exists()
    assert "wrote" in capsys.readouterr().out
    assert main(there) == 2
    assert "give --output another path" in capsys.readouterr().err


def test_to_megatron_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = ["--from", "hf", "--to", "megalite", "--input", str(GOLDEN / "llama3"), "--output", str(tmp_path / "ours")]
    there = [
        "--from",
        "megalite",
        "--to",
        "megatron",
        "--input",
        str(tmp_path / "ours"),
        "--output",
        str(tmp_path / "theirs"),
        "--dtype",
        "bf16",
    ]
    back = ["--from", "megatron", "--to", "megalite", "--input", str(tmp_path / "theirs"), "--output", str(tmp_path / "back")]
    assert main(into) == main([*there, "--dtype", "bf16"]) == 0
    assert main(back) == 2
    assert "give --vocab-size" in capsys.readouterr().err
    assert main([*back, "--vocab-size", "99"]) == 0
    assert (tmp_path / "theirs" / "latest_checkpointed_iteration.txt").read_text() == "release"


def test_adapters_there_and_back_and_merged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours, base = str(tmp_path / "ours"), str(GOLDEN / "gpt2")
    theirs = GOLDEN.parent / "lora" / "gpt2_all"
    assert main(["--from", "peft", "--to", "megalite", "--input", str(theirs), "--output", ours, "--base", base]) == 0
    assert 'lora_targets = ["q_proj"' in (tmp_path / "ours" / "config.toml").read_text()
    assert main(["--from", "megalite", "--to", "peft", "--input", ours, "--output", str(tmp_path / "back"), "--base", "openai/gpt2"]) == 0
    assert json.loads((tmp_path / "back" / "adapter_config.json").read_text())["base_model_name_or_path"] == "openai/gpt2"
    assert main(["--from", "megalite", "--to", "hf", "--input", ours, "--output", str(tmp_path / "whole")]) == 0
    assert (tmp_path / "whole" / "model.safetensors").stat().st_size == (GOLDEN / "gpt2" / "model.safetensors").stat().st_size
    capsys.readouterr()
    assert main(["--from", "megalite", "--to", "hf", "--input", ours, "--output", str(tmp_path / "no"), "--base", str(tmp_path)]) == 2
    assert "no checkpoint and no Hugging Face folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--from", "hf", "--to", "hf"],
        ["--from", "megalite", "--to", "megalite"],
        ["--from", "gguf", "--to", "megatron"],
        ["--from", "hf", "--to", "megalite", "--vocab-size", "9"],
        ["--from", "hf", "--to", "megalite", "--base", "folder"],
        ["--from", "peft", "--to", "megalite"],
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*options, "--input", str(tmp_path), "--output", str(tmp_path)])
    assert caught.value.code == 2
