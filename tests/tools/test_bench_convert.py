"""tools/bench_convert.py, with conversions in this process instead of five others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools import bench_convert, convert_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"


@pytest.mark.parametrize(("peak", "code"), [(10**6, 0), (10**12, 1)])
def test_the_limit_decides(peak: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(source: str, target: str, given: Path, out: Path, *more: str) -> dict[str, Any]:
        assert convert_checkpoint.main(["--from", source, "--to", target, "--input", str(given), "--output", str(out), *more]) == 0
        return {"from": source, "to": target, "seconds": 1.0, "peak_bytes": peak}

    monkeypatch.setattr(bench_convert, "measure", measure)
    assert bench_convert.main(["--input", str(GOLDEN / "llama3")]) == code
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["largest_tensor_bytes"] == 4 * 128 * 32
    assert figures["is_equal"]
    assert len(figures["conversions"]) == 5


def test_a_conversion_that_fails_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 9}')
    monkeypatch.setattr(bench_convert, "PROGRAM", "import sys; sys.exit('no such thing')")
    assert bench_convert.main(["--input", str(tmp_path)]) == 2
    assert "hf to megalite failed: no such thing" in capsys.readouterr().err
