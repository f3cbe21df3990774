"""SIGKILL at random moments of preprocessing: every dataset is complete or absent, and the next run does not mind.

    python tests/kill_preprocess.py --kills 50 --seed 0

One undisturbed run gives the expected bytes, and the time that a run takes from its first output file on. Then runs of the same
command are killed at random moments, a third of them during the last moments, where files get their names. After each: every
dataset whose .idx is there has the expected bytes in all three files, the workers are gone, and (at the end) one more run over
all the left-overs gives the expected bytes and removes every temporary file. The last line of standard output is the result as
JSON; the exit code is 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KEYS = ("text", "title")
SUFFIXES = (".bin", ".idx", ".meta.json")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write_corpus(path: Path, num_lines: int) -> None:
    rng = random.Random(7)
    words = ["the", "quick", "fox", "日本", "\n", "a  b"]
    lines = ({"text": " ".join(rng.choices(words, k=rng.randint(0, 60))), "title": rng.choice(words)} for _ in range(num_lines))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def start(folder: Path, workers: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "tools" / "preprocess_data.py"), "--input", str(folder / "in.jsonl"), "--append-eod"]
    command += ["--output-prefix", str(folder / "out" / "o"), "--tokenizer-type", "bytes", "--json-keys", *KEYS]
    command += ["--workers", str(workers), "--chunk-bytes", "2000"]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files that have their final names."""
    return {path.name: path.read_bytes() for path in (folder / "out").glob("o_*") if ".tmp." not in path.name}


def wait_for_output(folder: Path, process: subprocess.Popen[bytes]) -> float:
    """The moment when the run opens its first output file (before that there is nothing that a kill could damage)."""
    while process.poll() is None and not list((folder / "out").glob("*.tmp.*")):
        time.sleep(0.001)
    return time.perf_counter()


def undisturbed(folder: Path, workers: int) -> tuple[dict[str, bytes], float]:
    process = start(folder, workers)
    begun = wait_for_output(folder, process)
    if process.wait() != 0:
        raise SystemExit("error: the undisturbed run failed")
    return contents(folder), time.perf_counter() - begun


def kill_once(folder: Path, workers: int, delay: float) -> bool:
    """Start a run and kill it `delay` seconds after its first output; returns whether it was still running."""
    process = start(folder, workers)
    wait_for_output(folder, process)
    time.sleep(delay)
    was_running = process.poll() is None
    process.kill()
    process.wait()
    if not is_gone(process.pid):
        raise SystemExit("error: workers outlived the killed run")
    return was_running


def is_gone(session: int, seconds: float = 20.0) -> bool:
    """Whether all processes of a session end."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_session(entry) == session for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
            return True
        time.sleep(0.02)
    return False


def _session(entry: Path) -> int:
    try:
        fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return -1
    return -1 if fields[0] == "Z" else int(fields[3])


def wrong_datasets(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Every dataset that can be opened (its .idx is there) must be complete, side file included."""
    problems = []
    for key in KEYS:
        prefix = f"o_{key}_document"
        if f"{prefix}.idx" in found:
            problems += [f"{prefix}{s} is wrong" for s in SUFFIXES if found.get(prefix + s) != expected[prefix + s]]
    return problems


def run(num_kills: int, seed: int, num_lines: int = 3000) -> dict[str, object]:
    """All kills; returns the figures, of which `problems` must be empty."""
    rng = random.Random(seed)
    figures = {"kills": num_kills, "running": 0, "absent": 0, "partly": 0, "complete": 0}
    problems: list[str] = []
    folder = Path(tempfile.mkdtemp(prefix="kill-preprocess-"))
    try:
        (folder / "out").mkdir()
        write_corpus(folder / "in.jsonl", num_lines)
        expected, _ = undisturbed(folder, workers=1)
        seconds = {workers: undisturbed(folder, workers)[1] for workers in (1, 2)}
        for number in range(num_kills):
            for path in (folder / "out").glob("*"):
                if ".tmp." not in path.name:  # left-overs stay: the next run meets them
                    path.unlink()
            workers = 1 + number % 2
            delay = seconds[workers] * (rng.uniform(0.85, 1.1) if number % 3 == 2 else rng.uniform(0, 1))
            figures["running"] += kill_once(folder, workers, delay)
            found = contents(folder)
            problems += [f"kill {number}: {problem}" for problem in wrong_datasets(found, expected)]
            num_idx = sum(name.endswith(".idx") for name in found)
            figures[{0: "absent", len(KEYS): "complete"}.get(num_idx, "partly")] += 1
        problems += _last_run(folder, expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**figures, "problems": problems}


def _last_run(folder: Path, expected: dict[str, bytes]) -> list[str]:
    found, _ = undisturbed(folder, workers=2)
    left = sorted(path.name for path in (folder / "out").glob("*.tmp.*"))
    problems = ["the run after all kills gives other bytes"] if found != expected else []
    return problems + ([f"left over: {left}"] if left else [])


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill preprocessing at random moments.")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    figures = run(args.kills, args.seed)
    print(json.dumps(figures))
    return 1 if figures["problems"] or not figures["running"] else 0


if __name__ == "__main__":
    sys.exit(main())
