"""tools/convert_checkpoint.py from the command line."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "options",
    [
        ["--from", "hf", "--to", "hf"],
        ["--from", "megalite", "--to", "megalite"],
        ["--from", "gguf", "--to", "megatron"],
        ["--from", "hf", "--to", "megalite", "--vocab-size", "9"],
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*options, "--input", str(tmp_path), "--output", str(tmp_path)])
    assert caught.value.code == 2
