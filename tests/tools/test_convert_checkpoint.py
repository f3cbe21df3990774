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


def test_the_same_format_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--from", "hf", "--to", "hf", "--input", str(tmp_path), "--output", str(tmp_path)])
    assert caught.value.code == 2
