"""merge_datasets and inspect_dataset as programs: exit codes, what they print, and the JSON line; the options of preprocessing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megalite.data.preprocess import Counts
from tools import inspect_dataset, merge_datasets, preprocess_data

GOLDEN = Path(__file__).parents[1] / "golden"
HF = GOLDEN / "preprocess" / "tok_hf_nobos"


def call(capsys: pytest.CaptureFixture[str], tool, *arguments: object) -> tuple[int, str, str]:
    code = tool.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def prefix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    (tmp_path / "in.jsonl").write_text('{"text": "The quick brown fox"}\n{"text": ""}\n{"text": ["naïve\\n", "日本"]}\n')
    options = ["--tokenizer-type", "hf", "--tokenizer-model", HF, "--append-eod", "--workers", 1]
    code, out, err = call(capsys, preprocess_data, "--input", tmp_path / "in.jsonl", "--output-prefix", tmp_path / "o", *options)
    assert code == 0, err
    result = json.loads(out)
    assert (result["records"], result["documents"], result["skipped"]) == (3, 3, 0)
    return result["outputs"][0]


def test_verify_finds_the_figures_of_preprocessing(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, inspect_dataset, prefix, "--verify")
    figures = json.loads(out.splitlines()[-1])
    assert (code, err, figures["ok"], figures["problems"]) == (0, "", True, [])
    recorded = json.loads(Path(f"{prefix}.meta.json").read_text())
    for name in ("documents", "empty_documents", "sequences", "tokens", "max_id", "bin_sha256", "dtype", "eod_id"):
        assert figures[name] == recorded[name], name


def test_a_document_is_decoded(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, inspect_dataset, prefix, "--document", 2)
    assert code == 0
    assert "naïve\n" in out
    assert "document 2, sequence 1: " in out
    assert "\n日本\n" in out
    code, out, err = call(capsys, inspect_dataset, prefix, "--document", 3)
    assert (code, err) == (1, f"error: document 3: {prefix} has documents 0 to 2\n")
    assert json.loads(out.splitlines()[-1])["ok"] is False


def test_another_tokenizer_is_refused(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = GOLDEN / "preprocess" / "tok_hf_bos"
    code, _, err = call(capsys, inspect_dataset, prefix, "--document", 0, "--tokenizer-model", other)
    assert code == 1
    assert "is not the tokenizer that made" in err
    code, _, err = call(capsys, inspect_dataset, prefix, "--document", 0, "--tokenizer-model", "/nowhere")
    assert code == 1
    assert "is gone" in err
    code, _, err = call(capsys, inspect_dataset, GOLDEN / "indexed" / "a_uint16", "--document", 0)
    assert code == 1
    assert "does not record its tokenizer" in err


def test_damage_gives_exit_code_one(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(f"{prefix}.bin")
    path.write_bytes(path.read_bytes()[:-2])
    code, out, err = call(capsys, inspect_dataset, prefix, "--verify")
    assert code == 1
    assert err.startswith("error: ")
    assert json.loads(out)["problems"]


def test_pictures(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, inspect_dataset, prefix, "--plot", tmp_path / "lengths.svg")
    assert code == 0, err
    assert "<svg" in (tmp_path / "lengths.svg").read_text()
    code, _, err = call(capsys, inspect_dataset, prefix, "--plot", tmp_path / "lengths.xyz")
    assert code == 1
    assert "cannot write" in err


def test_merging_a_folder_and_a_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Requirement 17: Megatron's form and the explicit one give the golden file."""
    inputs = [GOLDEN / "indexed" / name for name in ("a_uint16", "b_uint16")]
    folder = tmp_path / "parts"
    folder.mkdir()
    for path in inputs:
        for suffix in (".bin", ".idx"):
            (folder / f"{path.name}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    for number, arguments in enumerate(([folder], inputs)):
        code, out, err = call(capsys, merge_datasets, "--input", *arguments, "--output-prefix", tmp_path / f"m{number}")
        assert code == 0, err
        assert [Path(name).name for name in json.loads(out)["inputs"]] == ["a_uint16", "b_uint16"]
        for suffix in (".bin", ".idx"):
            assert Path(f"{tmp_path}/m{number}{suffix}").read_bytes() == (GOLDEN / "indexed" / f"merged_a_b_uint16{suffix}").read_bytes()
    code, out, err = call(capsys, merge_datasets, "--input", inputs[0], GOLDEN / "indexed" / "c_int32", "--output-prefix", tmp_path / "x")
    assert (code, out) == (1, "")
    assert "uint16 ids and" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.glob("x*"))


def test_gpt2_files_and_options_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = json.loads((HF / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(pairs) + "\n")
    options = ["--input", GOLDEN / "preprocess" / "in.jsonl", "--tokenizer-type", "GPT2BPETokenizer", "--append-eod", "--workers", 1]
    files = ["--vocab-file", tmp_path / "vocab.json", "--merge-file", tmp_path / "merges.txt"]
    code, _, err = call(capsys, preprocess_data, *options, *files, "--output-prefix", tmp_path / "o")
    assert code == 0, err
    for suffix in (".bin", ".idx"):
        expected = (GOLDEN / "preprocess" / f"hf_nobos_text_document{suffix}").read_bytes()
        assert (tmp_path / f"o_text_document{suffix}").read_bytes() == expected
    code, _, err = call(capsys, preprocess_data, *options, *files[:2], "--output-prefix", tmp_path / "x")
    assert code == 1
    assert "belong together" in err
    with pytest.raises(SystemExit):
        call(capsys, preprocess_data, *options, "--partitions", 4, "--output-prefix", tmp_path / "x")
    assert "--partitions is not needed: give all files with --input" in capsys.readouterr().err


def test_progress_bar_only_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(documents=3, tokens=5_000_000, num_bytes=10**7, consumed=50, total=100)
    with preprocess_data.Progress() as progress:
        progress(counts)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    with preprocess_data.Progress() as progress:
        progress(counts)
        assert progress._bar is not None
        progress._bar.refresh()
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("50%", "5,000,000 tokens", "tokens/s", "ETA"):
        assert part in shown.err
