"""The command line tools as a user runs them: exit codes, output lines, and what remains after a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megalite.data.indexed import IndexedDataset
from megalite.data.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "preprocess"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def tool(name: str, *arguments: object, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a tool."""
    command = [sys.executable, str(ROOT / "tools" / f"{name}.py"), *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, env=ENVIRONMENT, timeout=120, check=False)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def start(*arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT, preexec_fn=let_interrupt)


def let_interrupt() -> None:
    """A shell that starts a job in the background may have switched SIGINT off, which children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def worker_processes(parent: int) -> list[int]:
    """Process ids of the encoding workers below a process."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def feed_until_it_has_workers(process: subprocess.Popen[bytes]) -> list[int]:
    assert process.stdin is not None
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        process.stdin.write(b'{"text": "some text"}\n' * 100)
        process.stdin.flush()
        if len(workers := worker_processes(process.pid)) == 2:
            return workers
    raise AssertionError("no workers were started")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_golden_files_from_the_command_line(tmp_path: Path) -> None:
    code, out, err = tool(
        *("preprocess_data", "--input", GOLDEN / "in.jsonl", "--output-prefix", tmp_path / "new" / "out"),
        *("--tokenizer-type", "hf", "--tokenizer-model", GOLDEN / "tok_hf_nobos", "--append-eod", "--workers", 2),
        *("--json-keys", "text", "title", "--special-tokens-in-text", "count", "--chunk-bytes", 100),
    )
    assert code == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["outputs"] == [str(tmp_path / "new" / f"out_{key}_document") for key in ("text", "title")]
    for key, prefix in zip(("text", "title"), result["outputs"], strict=True):
        for suffix in (".bin", ".idx"):
            assert Path(prefix + suffix).read_bytes() == (GOLDEN / f"hf_nobos_{key}_document{suffix}").read_bytes()
    assert {name: result[name] for name in ("documents", "empty", "sequences", "skipped", "special_strings")} == {
        "documents": 10,
        "empty": 2,
        "sequences": 8,
        "skipped": 0,
        "special_strings": 0,
    }
    assert (result["dtype"], result["eod_id"], result["bos_id"], result["vocab_size"]) == ("uint16", 0, None, 300)
    assert result["tokens"] == (254 + 44) // 2
    assert result["seconds"] > 0
    assert result["tokens_per_s"] > 0
    assert "EOD 0 appended" in err


def test_standard_input_and_skipping(tmp_path: Path) -> None:
    code, out, err = tool(
        *("preprocess_data", "--input", "-", "--output-prefix", tmp_path / "o", "--tokenizer-type", "bytes"),
        *("--skip-invalid", "--workers", 1),
        stdin=b'{"text": "ab"}\n{"no": 1}\n',
    )
    assert (code, json.loads(out.splitlines()[-1])["skipped"]) == (0, 1)
    assert "first skipped record: -:2: the key 'text' is missing" in err
    assert [ids.tolist() for ids in IndexedDataset(tmp_path / "o_text_document")] == [[97, 98]]


@pytest.mark.parametrize(
    ("stdin", "options", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', [], "error: -:2: invalid JSON: unexpected end of data"),
        (b"", [], "error: no token was written for key 'text': 0 documents"),
        (b'{"text": "a"}', ["--prepend-bos"], "error: bytes has no beginning-of-sequence token"),
        (b'{"text": "a"}', ["--tokenizer-model", "x", "--eod-token", "y"], "error: 2 settings are wrong: 1. "),
        (b'{"text": "a"}', ["--workers", "0"], "error: workers is 0"),
    ],
)
def test_failures_are_one_line(tmp_path: Path, stdin: bytes, options: list[str], message: str) -> None:
    arguments = ["--input", "-", "--output-prefix", tmp_path / "o", "--tokenizer-type", "bytes", "--workers", 1]
    code, out, err = tool("preprocess_data", *arguments, *options, stdin=stdin)
    assert (code, out) == (1, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_unknown_and_abbreviated_options_are_errors(tmp_path: Path) -> None:
    arguments = ["--input", "-", "--output-prefix", tmp_path / "o", "--tokenizer-type", "bytes"]
    for wrong in ("--append-eos", "--append"):
        code, _, err = tool("preprocess_data", *arguments, wrong)
        assert code == 2
        assert f"unrecognized arguments: {wrong}" in err


@pytest.mark.timeout(120)
def test_killed_worker_ends_the_run(tmp_path: Path) -> None:
    """Requirement 10: within seconds, exit code 1, one line, no output."""
    arguments = ["--output-prefix", tmp_path / "o", "--tokenizer-type", "bytes", "--workers", 2, "--chunk-bytes", 1000]
    process = start("--input", "-", *arguments)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    workers = feed_until_it_has_workers(process)
    os.kill(workers[0], signal.SIGKILL)
    killed = time.monotonic()
    try:
        while process.poll() is None and time.monotonic() - killed < 30:
            process.stdin.write(b'{"text": "more"}\n' * 1000)
            process.stdin.flush()
    except BrokenPipeError:
        pass
    assert process.wait(timeout=10) == 1
    assert process.stderr.read().startswith(b"error: one of 2 worker processes died")
    assert process.stdout.read() == b""
    assert list(tmp_path.iterdir()) == []
    assert not any(map(is_running, workers))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("number", "code", "kept"), [(signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 0), (signal.SIGKILL, -9, 1)])
def test_stopped_run_leaves_no_workers(tmp_path: Path, number: int, code: int, kept: int) -> None:
    arguments = ["--output-prefix", tmp_path / "o", "--tokenizer-type", "bytes", "--workers", 2, "--chunk-bytes", 1000]
    process = start("--input", "-", *arguments)
    assert process.stderr is not None
    workers = feed_until_it_has_workers(process)
    time.sleep(0.3)  # until it waits for more input
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    deadline = time.monotonic() + 20
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    assert b"Traceback" not in process.stderr.read()
    assert len(list(tmp_path.glob("*.tmp.*"))) == kept  # nobody can clean up after SIGKILL
    assert not list(tmp_path.glob("*.idx"))


@pytest.mark.parametrize("name", ["preprocess_data", "train_tokenizer", "merge_datasets", "inspect_dataset"])
def test_tools_and_workers_do_not_import_torch(name: str) -> None:
    """Requirement 18."""
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='tool'); import megalite.data.tokenizer_hf;"
        "print(*[m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers')])"
    )
    command = [sys.executable, "-c", code, str(ROOT / "tools" / f"{name}.py")]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=120, check=True, text=True)
    assert done.stdout.strip() == ""


def test_trained_tokenizer_through_preprocessing_and_back(tmp_path: Path) -> None:
    text = (ROOT / "examples" / "data" / "shakespeare.txt").read_bytes()[:40_000]
    (tmp_path / "part.txt").write_bytes(text)
    for kind, options in (("sentencepiece", ["--vocab-size", 350]), ("chars", ["--model-type", "chars"])):
        prefix = tmp_path / kind
        code, out, err = tool("train_tokenizer", "--input", tmp_path / "part.txt", "--output-prefix", prefix, *options)
        assert code == 0, err
        model = json.loads(out)["model"]
        code, out, err = tool(
            *("preprocess_data", "--input", tmp_path / "part.txt", "--output-prefix", prefix, "--workers", 1),
            *("--tokenizer-type", kind, "--tokenizer-model", model),
        )
        assert (code, err.count("\n")) == (0, 2), err  # a lossless model brings no warning
        [ids] = IndexedDataset(f"{prefix}_text_document")
        assert build_tokenizer(kind, model).decode(ids.tolist()) == text.decode()


def test_training_failures_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words")
    for options, message in (
        (["--vocab-size", 9999], "error: no bpe model of 9999 pieces can be made from these texts: "),
        ([], "error: a bpe model needs --vocab-size"),
        (["--model-type", "chars", "--vocab-size", 5], "error: the size of a chars vocabulary follows"),
    ):
        code, out, err = tool("train_tokenizer", "--input", tmp_path / "a.txt", "--output-prefix", tmp_path / "t", *options)
        assert (code, out) == (1, "")
        assert err.startswith(message)
        assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
