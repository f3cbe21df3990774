"""Speed of preprocessing against a multiprocessing.Pool that encodes one document at a time, as Megatron's tool does.

    python tools/bench_preprocess.py                  50 MB of JSON lines, 2 workers, 3 pairs of runs; minutes
    python tools/bench_preprocess.py --megabytes 5 --pairs 1
    pip install --target /tmp/gigatoken gigatoken
    python tools/bench_preprocess.py --kinds gigatoken --gigatoken /tmp/gigatoken

The corpus: examples/data/shakespeare.txt, then the Python sources of the standard library, of torch and of transformers, each file
once and in sorted order, cut at line ends into documents of 300 to 8,000 characters. No text is repeated, so neither side's word
cache sees anything twice that a real corpus would not repeat. The tokenizers are trained on parts of it (or given).

The reference: Pool(workers).imap(encode, lines, 32), where encode is json.loads and one call of the tokenizer's own library
for one text; the parent appends to the same writer. It calls `tokenizers` directly, without the layer of transformers in
between, which makes it faster than the original. For `gigatoken` it is one process that hands batches of 1,000 documents to the
package of that name, which uses all cores. Both sides are started as programs, in turn, and must write the same bytes. The ratio
of a pair is reference time / our time; the result is the median over pairs. Peak memory is the largest sum of resident sizes of
our parent and workers. The last line is JSON; the exit code is 1 when a ratio or the memory misses its bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEAST_RATIO = {"sentencepiece": 2.0, "hf": 4.0, "gigatoken": 1.3}
MOST_MEMORY_MB = 500.0
_SHORTEST, _LONGEST = 300, 8_000
_IMAP_CHUNK = 32
_BATCH = 1_000
_SAMPLE_CHARACTERS = 2_000_000
_SPM_VOCAB, _HF_VOCAB = 8_000, 32_000


def source_files() -> Iterator[Path]:
    """The text of the corpus, each file once."""
    yield ROOT / "examples" / "data" / "shakespeare.txt"
    library = Path(sysconfig.get_path("stdlib"))
    yield from (path for path in sorted(library.rglob("*.py")) if "site-packages" not in path.parts)
    for name in ("torch", "transformers"):
        spec = importlib.util.find_spec(name)  # finds the folder, imports nothing
        if spec is not None and spec.origin is not None:
            yield from sorted(Path(spec.origin).parent.rglob("*.py"))


def documents(seed: int = 0) -> Iterator[str]:
    """Pieces of all files, cut at line ends; their lengths are spread evenly over the scale of powers."""
    rng = random.Random(seed)
    for path in source_files():
        text = path.read_bytes().decode("utf-8", errors="ignore")
        start = 0
        while start < len(text):
            aim = start + int(_SHORTEST * (_LONGEST / _SHORTEST) ** rng.random())
            end = text.find("\n", aim) + 1 or len(text)
            yield text[start:end]
            start = end


def write_corpus(path: Path, num_bytes: int) -> int:
    """Write JSON lines until `num_bytes` are there; returns the number of documents."""
    size = count = 0
    with path.open("wb") as file:
        for text in documents():
            size += file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            count += 1
            if size >= num_bytes:
                return count
    raise SystemExit(f"error: only {size / 1e6:.0f} MB of text on this machine, {num_bytes / 1e6:.0f} MB were asked for")


def sample(path: Path) -> Iterator[str]:
    """Every n-th document, about _SAMPLE_CHARACTERS in all."""
    every = max(1, path.stat().st_size // _SAMPLE_CHARACTERS)
    with path.open("rb") as file:
        for number, line in enumerate(file):
            if number % every == 0:
                yield json.loads(line)["text"]


def train(kind: str, corpus: Path, folder: Path) -> Path:
    """A tokenizer of the corpus: a lossless SentencePiece BPE, or a byte-level BPE as a tokenizer.json."""
    if kind == "sentencepiece":
        from megalite.data.tokenizer_training import train_sentencepiece

        train_sentencepiece(sample(corpus), folder / "spm.model", _SPM_VOCAB)
        return folder / "spm.model"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=_HF_VOCAB, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(sample(corpus), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


_encode_one = None  # in a worker of the reference loop, as in the original: its initializer puts the tokenizer into a global


def _load(kind: str, model: str) -> None:
    global _encode_one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if kind == "sentencepiece":
        import sentencepiece

        _encode_one = sentencepiece.SentencePieceProcessor(model_file=model).encode_as_ids
    else:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(model)
        _encode_one = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731


def _encode_line(line: str, eod_id: int) -> list[int]:
    assert _encode_one is not None
    ids = _encode_one(json.loads(line)["text"])
    return [*ids, eod_id] if ids else ids


def reference_loop(corpus: str, prefix: str, kind: str, model: str, workers: int) -> None:
    """The loop that is compared with."""
    from megalite.data.indexed import best_dtype
    from megalite.data.indexed_writer import IndexedDatasetWriter
    from megalite.data.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(kind, model, backend="reference")
    assert tokenizer.eod_id is not None, "both kinds of trained tokenizer have one"
    encode = partial(_encode_line, eod_id=tokenizer.eod_id)
    with (
        open(corpus, encoding="utf-8", newline="\n") as lines,
        multiprocessing.Pool(workers, initializer=_load, initargs=(kind, model)) as pool,
        IndexedDatasetWriter(prefix, best_dtype(tokenizer.vocab_size - 1)) as writer,
    ):
        for ids in pool.imap(encode, lines, _IMAP_CHUNK):
            writer.add_document(ids)


def gigatoken_loop(corpus: str, prefix: str, model: str, package: str) -> None:
    """The loop that batches through gigatoken."""
    sys.path.append(package)
    import gigatoken  # pyright: ignore[reportMissingImports]

    from megalite.data.indexed import best_dtype
    from megalite.data.indexed_writer import IndexedDatasetWriter

    tokenizer = gigatoken.Tokenizer.from_json(Path(model).read_bytes())
    eod_id = next(number for number, piece in tokenizer.vocab.items() if piece == b"<|endoftext|>")
    with open(corpus, "rb") as lines, IndexedDatasetWriter(prefix, best_dtype(tokenizer.vocab_size - 1)) as writer:
        while batch := [json.loads(line)["text"] for line in islice(lines, _BATCH)]:
            for ids in tokenizer.encode_batch_list(batch):
                writer.add_document([*ids, eod_id] if ids else ids)


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its descendants in MB (shared pages are counted in each)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return 0.0
    own = next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0.0)
    return own + sum(resident_mb(int(child)) for child in children)


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds and peak memory (MB) of a program."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peak, ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, resident_mb(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, errors = process.communicate()
    seconds = time.perf_counter() - begun
    ended.set()
    watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"error: {' '.join(command)} failed: {errors.decode()}")
    return seconds, peak


def compare(kind: str, model: Path, corpus: Path, folder: Path, args: argparse.Namespace) -> dict[str, object]:
    """The figures of one tokenizer."""
    workers, tokenizer_type = args.workers, "hf" if kind == "gigatoken" else kind
    ours = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(corpus), "--append-eod", "--workers", str(workers)]
    ours += ["--output-prefix", str(folder / "ours"), "--tokenizer-type", tokenizer_type, "--tokenizer-model", str(model)]
    theirs = [sys.executable, __file__, "--reference-loop", str(corpus), str(folder / "theirs"), kind, str(model)]
    theirs.append(args.gigatoken if kind == "gigatoken" else str(workers))
    ratios, seconds, memory = [], [], []
    for number in range(args.pairs):
        runs = {name: timed(command) for name, command in [("ours", ours), ("theirs", theirs)][:: 1 if number % 2 else -1]}
        ratios.append(runs["theirs"][0] / runs["ours"][0])
        seconds.append((runs["ours"][0], runs["theirs"][0]))
        memory.append(runs["ours"][1])
        for suffix in (".bin", ".idx"):
            if (folder / f"ours_text_document{suffix}").read_bytes() != (folder / f"theirs{suffix}").read_bytes():
                raise SystemExit(f"error: {kind}: the two sides wrote different {suffix} files")
        print(f"{kind}: ours {runs['ours'][0]:.1f} s, the loop {runs['theirs'][0]:.1f} s, ratio {ratios[-1]:.2f}", file=sys.stderr)
    return {
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "seconds": round(statistics.median(ours for ours, _ in seconds), 2),
        "reference_seconds": round(statistics.median(theirs for _, theirs in seconds), 2),
        "mb_per_s": round(corpus.stat().st_size / 1e6 / statistics.median(ours for ours, _ in seconds), 2),
        "peak_mb": round(max(memory), 1),
        "same_output": True,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=50.0, help="size of the corpus (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each side (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="processes that encode, on both sides (default: %(default)s)")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(LEAST_RATIO), default=["sentencepiece", "hf"], help="what to compare (default: both tokenizers)"
    )
    parser.add_argument("--gigatoken", help="folder that gigatoken was installed to")
    parser.add_argument("--sentencepiece-model", type=Path, help="use this model in place of a trained one")
    parser.add_argument("--hf-tokenizer", type=Path, help="use this tokenizer.json in place of a trained one")
    parser.add_argument("--reference-loop", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.reference_loop:
        where, kind, (model, last) = args.reference_loop[:2], args.reference_loop[2], args.reference_loop[3:]
        if kind == "gigatoken":
            gigatoken_loop(*where, model, last)
        else:
            reference_loop(*where, kind, model, int(last))
        return 0
    if "gigatoken" in args.kinds and not args.gigatoken:
        parser.error("--kinds gigatoken needs --gigatoken FOLDER, where that package was installed to")
    given = {"sentencepiece": args.sentencepiece_model, "hf": args.hf_tokenizer, "gigatoken": args.hf_tokenizer}
    with tempfile.TemporaryDirectory(prefix="bench-preprocess-") as name:
        folder = Path(name)
        corpus = folder / "corpus.jsonl"
        num_documents = write_corpus(corpus, int(args.megabytes * 1e6))
        figures = {}
        for kind in args.kinds:
            model = given[kind] or train(kind, corpus, folder)
            figures[kind] = compare(kind, model, corpus, folder, args)
    missed = [f"{kind} ratio {got['ratio']}" for kind, got in figures.items() if got["ratio"] < LEAST_RATIO[kind]]
    missed += [f"{kind} memory {got['peak_mb']} MB" for kind, got in figures.items() if got["peak_mb"] > MOST_MEMORY_MB]
    settings = {"megabytes": args.megabytes, "documents": num_documents, "workers": args.workers}
    print(json.dumps({**settings, **figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
