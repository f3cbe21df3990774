"""Random hostile corpora through preprocessing: the dataset is exactly right, or there is one clear error.

    python tests/fuzz_preprocess.py --cases 10000 --seed 0

What is right is decided here, by the json module of the standard library and by plain loops; nothing of it is shared with
the code under test. Each case is a corpus (Unicode line separators, surrogates, byte order marks, CR, NUL, long lines,
truncated and pretty-printed JSON, wrong types, duplicate keys, deep nesting, huge numbers, damaged bytes, damaged archives) and random
settings. Accepted: the expected documents, ids and counts; or one DataError of one line that names the first bad line,
with nothing left on disk. The last line of standard output is the result as JSON; the exit code is 1 for any failure.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import zstandard

from megalite.data.indexed import IndexedDataset
from megalite.data.preprocess import PreprocessOptions, preprocess
from megalite.data.tokenizer import Tokenizer, TokenizerSpec
from megalite.errors import DataError

HF = str(Path(__file__).parent / "golden" / "preprocess" / "tok_hf_nobos")
DEEPEST = 900  # both parsers read less, neither reads much more; what lies between is not judged
PIECES = (
    *("a", "fox", "the quick", " ", "  ", "\t", "\n", "\r", "\r\n", "\x00", "\x0b", "\x0c", "\x1c", "\x1e", "\x85", "\u2028", "\u2029"),
    *("\ufeff", "\u200b", "é", "e\u0301", "ﬁ", "日本", "🙂", "\U0010ffff", "\ufffd", '"', "\\", "/", "{", "}", "[", "]", ":", ","),
    *("<|endoftext|>", "</s>", "\u2581", "null", "0", "\x7f", "'"),
)


@dataclass
class Expected:
    """What a corpus should give: the sequences of each valid record and key, and the numbers of the bad lines."""

    documents: list[list[list[str]]] = field(default_factory=list)
    bad_lines: list[int] = field(default_factory=list)
    is_judged: bool = True


def random_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.1:
        return ""
    if kind < 0.13:
        return rng.choice(PIECES) * rng.randint(100, 20_000)
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 12)))


def random_value(rng: random.Random) -> object:
    """A value for a text key: usually a text, sometimes texts, sometimes nothing that a text can be."""
    kind = rng.random()
    if kind < 0.8:
        return random_text(rng)
    if kind < 0.92:
        return [random_text(rng) for _ in range(rng.randint(0, 4))]
    return rng.choice([None, True, False, 0, -1.5, 10**30, {}, {"text": "a"}, [1], ["a", None], [["a"]], [[]]])


def random_extra(rng: random.Random) -> str:
    """JSON of a value that nobody asked for."""
    depth = rng.choice([1, 3, 100, 700, 2000])
    choices = ("1", "-0.0", "1e308", "1e999", "9" * 400, "1" * 25, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, '"x"')
    return rng.choice((*choices, "NaN", "Infinity", "01", "+1", ".5", "0x1", "tru", "'a'", '"\\ud800"', '"\\udc00\\ud800"', '"\\x41"'))


def random_line(rng: random.Random, keys: tuple[str, ...]) -> bytes:
    """One line without its end: mostly a valid record, mostly damaged in one way if not."""
    kind = rng.random()
    if kind < 0.05:
        return rng.choice([b"", b"  ", b"\t", b"\r", b" \r"])
    fields = [f"{json.dumps(key)}:{json.dumps(random_value(rng), ensure_ascii=rng.random() < 0.5)}" for key in keys]
    if kind < 0.15:
        fields.append(f'"extra":{random_extra(rng)}')
    if kind < 0.2:
        fields.append(f'"text":{json.dumps(random_text(rng))}')  # twice: the last one counts
    if kind > 0.97:
        fields.pop()
    rng.shuffle(fields)
    line = ("{" + ",".join(fields) + "}").encode("utf-8")
    if kind > 0.85:
        line = damage(rng, line)
    return line.replace(b"\n", b" ") + rng.choice([b"", b"", b"", b"\r"])


def damage(rng: random.Random, line: bytes) -> bytes:
    place = rng.randrange(len(line) + 1)
    choices = (
        line[:place],
        line + b" " + line,
        line[:place] + bytes([rng.randrange(256)]) + line[place:],
        line[:place] + b"\x00" + line[place:],
        line[:place] + b"\xed\xa0\x80" + line[place:],  # a surrogate in UTF-8
        b"\xef\xbb\xbf" + line,
        rng.choice([b"[]", b'"text"', b"null", b"3", b"{", b"}", b"\xff\xfe", b"text"]),
        line.replace(b'"', b"'"),
        line[:-1] + b",}",
        line.replace(b'"text":"', b'"text":"\\ud83d'),
    )
    return rng.choice(choices)


def judge(corpus: bytes, keys: tuple[str, ...]) -> Expected:
    """What the corpus should give, by the rules of the documentation."""
    expected = Expected()
    lines = corpus.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip(b" \t\r"):
            continue
        if nesting(line) > DEEPEST:
            expected.is_judged = False
        try:
            record = json.loads(line.decode("utf-8"), parse_constant=refuse, parse_float=double, parse_int=double)
            json.dumps(record, ensure_ascii=False).encode("utf-8")  # a lone surrogate fails here
            expected.documents.append([texts_of(record[key]) for key in keys])
        except (ValueError, KeyError, TypeError, RecursionError):
            expected.bad_lines.append(number)
    return expected


def nesting(line: bytes) -> int:
    depth = deepest = 0
    for byte in line:
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    return deepest


def refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")


def double(number: str) -> float:
    """Numbers that a double cannot hold are refused."""
    return float(number) if abs(float(number)) != float("inf") else refuse(number)


def texts_of(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    texts = [item for item in values if isinstance(item, str)]
    if len(texts) < len(values):
        raise TypeError("no text")
    return [text for text in texts if text]


def run_case(folder: Path, seed: int, tokenizers: dict[str, Tokenizer]) -> str:
    """One case; returns what came of it. Raises AssertionError when that is wrong."""
    rng = random.Random(seed)
    keys = rng.choice([("text",), ("text",), ("text", "b")])
    corpus = rng.choice([b"", b"", b"\xef\xbb\xbf"]) + b"\n".join(random_line(rng, keys) for _ in range(rng.choice([0, 1, 2, 5, 20])))
    corpus += rng.choice([b"", b"\n", b"\n\n"])
    path, is_damaged = write_corpus(rng, folder, corpus)
    kind = "hf" if rng.random() < 0.2 else "bytes"
    spec = TokenizerSpec(kind, HF if kind == "hf" else None)
    settings = {"append_eod": rng.random() < 0.5, "skip_invalid": rng.random() < 0.5, "chunk_bytes": rng.choice([1, 50, 1 << 20])}
    options = PreprocessOptions((str(path),), str(folder / "out"), spec, keys, **settings)
    expected = judge(corpus, keys)
    try:
        summary = preprocess(options, stdin=io.BytesIO(corpus))
    except DataError as error:
        check_error(str(error), folder, expected, options, is_damaged)
        return "error"
    assert not is_damaged, "a damaged archive gave a dataset"
    if expected.is_judged:
        assert options.skip_invalid or not expected.bad_lines, f"lines {expected.bad_lines[:3]} are invalid, but there is a dataset"
        assert summary.counts.skipped == len(expected.bad_lines), (summary.counts.skipped, expected.bad_lines)
        for place, prefix in enumerate(summary.outputs):
            check_dataset(prefix, [record[place] for record in expected.documents], tokenizers[kind], options.append_eod)
    return "dataset"


def write_corpus(rng: random.Random, folder: Path, corpus: bytes) -> tuple[Path, bool]:
    """The corpus as a file, perhaps compressed, perhaps cut off then; `-` stands for standard input."""
    kind = rng.random()
    if kind < 0.2:
        return Path("-"), False
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}
    suffix = rng.choice(list(packed)) if kind < 0.4 else ""
    content = packed[suffix](corpus) if suffix else corpus
    is_damaged = bool(suffix) and rng.random() < 0.2
    if is_damaged:
        content = content[: rng.randrange(len(content))]
    path = folder / f"in.jsonl{suffix if is_damaged or rng.random() < 0.5 else ''}"  # without the suffix the content tells
    path.write_bytes(content)
    return path, is_damaged


def check_error(message: str, folder: Path, expected: Expected, options: PreprocessOptions, is_damaged: bool) -> None:
    assert message.count("\n") == 0 and len(message) > 20, f"not one clear line: {message!r}"
    left = [path.name for path in folder.iterdir() if not path.name.startswith("in.jsonl")]
    assert not left, f"an error left {left}"
    if is_damaged or not expected.is_judged:
        return
    if expected.bad_lines and not options.skip_invalid:
        assert f"{options.inputs[0]}:{expected.bad_lines[0]}: " in message, f"line {expected.bad_lines[0]} is the first bad one: {message}"
        return
    is_empty = any(not any(record[place] for record in expected.documents) for place in range(len(options.json_keys)))
    assert is_empty and "no token was written" in message, f"this corpus is valid, but: {message}"


def check_dataset(prefix: str, documents: list[list[str]], tokenizer: Tokenizer, append_eod: bool) -> None:
    dataset = IndexedDataset(prefix)
    found = [[dataset[i].tolist() for i in range(a, b)] for a, b in pairwise(dataset.document_indices.tolist())]
    assert len(found) == len(documents), f"{len(found)} documents of {len(documents)}"
    for number, (sequences, texts) in enumerate(zip(found, documents, strict=True)):
        ids = [tokenizer.encode(text) for text in texts]
        if ids and append_eod:
            assert tokenizer.eod_id is not None
            ids[-1] = [*ids[-1], tokenizer.eod_id]
        assert sequences == ids, f"document {number} differs"


def run_cases(num_cases: int, seed: int, fail_fast: bool = True) -> dict[str, int]:
    """Run many cases in this process; returns how many gave what. Raises AssertionError at the first wrong one, if told."""
    tokenizers = {"bytes": TokenizerSpec("bytes").build(), "hf": TokenizerSpec("hf", HF, backend="reference").build()}
    counts = {"dataset": 0, "error": 0, "failures": 0}
    in_memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="fuzz-preprocess-", dir=in_memory if in_memory.is_dir() else None))
    try:
        for number in range(seed, seed + num_cases):
            folder = root / str(number)
            folder.mkdir()
            try:
                counts[run_case(folder, number, tokenizers)] += 1
            except Exception as error:
                if fail_fast:
                    raise AssertionError(f"case {number}: {type(error).__name__}: {error}") from error
                counts["failures"] += 1
                print(f"case {number}: {type(error).__name__}: {error}"[:500], file=sys.stderr)
            shutil.rmtree(folder)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description="Feed random hostile corpora to preprocessing.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case; case N is the same in every run")
    args = parser.parse_args()
    begun = time.perf_counter()
    counts = run_cases(args.cases, args.seed, fail_fast=False)
    print(json.dumps({"cases": args.cases, **counts, "seconds": round(time.perf_counter() - begun, 1)}))
    return 1 if counts["failures"] or not counts["dataset"] or not counts["error"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
