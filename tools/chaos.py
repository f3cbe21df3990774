"""Kill a training run with SIGKILL at random moments, resume it, and check that nothing that was promised is lost.

    python tools/chaos.py                   60 kills of a tiny model on two ranks, a third of them inside a save
    python tools/chaos.py --quick           3 kills, within a minute
    python tools/chaos.py --flags --pp 2    the same with other settings of the run (everything after --flags)

One undisturbed run gives the losses. Then runs of the same command (--save X --load X) are killed, one rank or all ranks, at any moment
from the start of the processes on; every third kill waits for the temporary directory of a save. Half of the runs save asynchronously.
After each kill: the other rank ends by itself (only before the ranks have met does it need a launcher for that, here the tool); the newest
complete checkpoint is at least as new as the last one that was announced in the log; the next run resumes from exactly that one; every
loss that was ever written equals the undisturbed run's bit for bit. Finished runs start over in a new folder. Prints a row per kill and,
last, one line of JSON; exits with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.testing.program import ProgramRanks

PROGRAM = Path(__file__).resolve().parents[1] / "pretrain_gpt.py"
RANKS = 2
STEPS = 24
SETTINGS = (
    "--mock-data --vocab-size 61 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    f"--global-batch-size 8 --train-iters {STEPS} --lr 1e-3 --device cpu --log-interval 1 --save-interval 3 --keep-last 2"
).split()
LIMIT = 60.0  # seconds in which a run goes on, and in which a rank whose neighbour is gone ends
MEETING = 2.0  # seconds that a rank which waits for one that will not come is left alone
SAVED, LOADED = re.compile(r"saved \S*step-(\d+)"), re.compile(r"loaded \S*step-(\d+)")


@dataclass
class Chaos:
    """A run that dies again and again. losses: of the undisturbed run; expected: the step that the next life must resume at."""

    folder: Path
    losses: dict[int, float]
    flags: Sequence[str]
    random: random.Random
    duration: float
    run_number: int = 0
    life: int = 0
    announced: int = 0
    expected: int = 0
    num_resumes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def save(self) -> Path:
        return self.folder / f"run-{self.run_number}"

    def begin_life(self) -> tuple[ProgramRanks, bool]:
        """The ranks, and whether they save asynchronously."""
        self.life += 1
        is_async = self.random.random() < 0.5
        arguments = [*self.flags, *(["--async-save"] if is_async else [])]
        return start(self.save, arguments, self.folder / f"log-{self.life}"), is_async

    def end_life(self, ranks: ProgramRanks) -> list[str]:
        """What is wrong after all ranks have ended; also takes down what the next life must find."""
        from megalite.checkpoint import complete_checkpoints, step_of

        found, text = [], ranks.output()
        loaded = [int(step) for step in LOADED.findall(text)]
        reached_training = bool(loaded) or "step 1/" in text or bool(SAVED.search(text))
        if reached_training and loaded != ([self.expected] if self.expected else []):
            found.append(f"resumed at {loaded or 'the beginning'} instead of step {self.expected}")
        self.num_resumes += bool(loaded)
        self.announced = max([self.announced, *(int(step) for step in SAVED.findall(text))])
        complete = [step_of(path) for path in complete_checkpoints(self.save)]
        self.expected = max(complete, default=0)
        if self.expected < self.announced:
            found.append(f"step {self.announced} was announced, the newest complete checkpoint is {self.expected}")
        found += wrong_losses(self.save, self.losses)
        if "Traceback" in text and "error:" not in text:
            found.append("a traceback instead of an error in words")
        return found

    def start_over(self) -> None:
        self.run_number += 1
        self.announced = self.expected = 0


def start(save: Path, flags: Sequence[str], logs: Path) -> ProgramRanks:
    from megalite.testing.program import ProgramRanks

    return ProgramRanks(PROGRAM, [*SETTINGS, "--save", str(save), "--load", str(save), *flags], RANKS, logs)


def read_losses(save: Path) -> list[tuple[int, float]]:
    """(step, loss) of every whole line of the metrics."""
    found, path = [], save / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            values = json.loads(line)
        except ValueError:
            continue  # cut off by a kill
        found += [(values["step"], values["loss"])] if "loss" in values else []
    return found


def wrong_losses(save: Path, losses: dict[int, float]) -> list[str]:
    wrong = sorted({step for step, loss in read_losses(save) if losses[step] != loss})
    return [f"losses of steps {wrong[:5]} are not the undisturbed run's"] if wrong else []


def undisturbed(folder: Path, flags: Sequence[str]) -> tuple[dict[int, float], float]:
    """The losses of every step, and the seconds that a run takes."""
    from megalite.testing.program import ProgramRanks

    ProgramRanks.warm_up()
    begin = time.perf_counter()
    ranks = start(folder / "undisturbed", flags, folder / "log-undisturbed")
    if ranks.wait(5 * LIMIT) or any(ranks.exit_codes):
        raise SystemExit(f"error: the undisturbed run failed:\n{ranks.output()}")
    losses = dict(read_losses(folder / "undisturbed"))
    assert len(losses) >= 1, "the undisturbed run wrote no metrics"
    return losses, time.perf_counter() - begin


def kill_once(chaos: Chaos, in_save: bool, victims: Sequence[int]) -> dict[str, object]:
    """Lives until one of them is killed as asked; the row of the table."""
    while True:
        ranks, is_async = chaos.begin_life()
        moment = chaos.random.uniform(0, chaos.duration)
        is_killed = kill_in_save(chaos, ranks, victims) if in_save else kill_after(ranks, victims, moment)
        begin = time.perf_counter()
        have_met = "parameters |" in ranks.output()
        alive = ranks.wait(LIMIT if have_met or not is_killed else MEETING)
        seconds = time.perf_counter() - begin
        found = chaos.end_life(ranks)
        if alive and (have_met or not is_killed):
            found.append(f"ranks {alive} did not end within {LIMIT:.0f} s")
        survivors = [code for rank, code in enumerate(ranks.exit_codes) if rank not in victims]
        if not is_killed and any(ranks.exit_codes):
            found.append(f"the run failed by itself: exit codes {ranks.exit_codes}, {ranks.output()[-500:]}")
        if is_killed and 0 in survivors and STEPS not in [step for step, _ in read_losses(chaos.save)]:
            found.append("a rank whose neighbour was killed says that all is well")
        chaos.problems += [f"life {chaos.life}: {problem}" for problem in found]
        if ranks.exit_codes == [0] * RANKS:
            chaos.start_over()
        if is_killed or found:
            return {
                "async": is_async,
                "announced": chaos.announced,
                "complete": chaos.expected,
                "ended": f"{seconds:.1f} s" if not alive else "by launcher",
                "verdict": "; ".join(found) or "ok",
            }


def kill_after(ranks: ProgramRanks, victims: Sequence[int], seconds: float) -> bool:
    """Kill at a moment of the whole life, start-up included. False where the run had ended before."""
    _wait_until(lambda: ranks.has_ended, seconds)
    return _kill(ranks, victims)


def kill_in_save(chaos: Chaos, ranks: ProgramRanks, victims: Sequence[int]) -> bool:
    """Kill while a temporary directory of a save is there. False where the run ended before."""
    skipped = chaos.random.randrange(3)
    delay = chaos.random.uniform(0, 0.03)
    seen: set[tuple[str, int]] = set()
    while not ranks.has_ended:
        _wait_until(lambda: ranks.has_ended or bool(saving(chaos.save)), LIMIT)
        here = saving(chaos.save)
        if here and not here <= seen and len(seen) >= skipped:
            time.sleep(delay)
            if saving(chaos.save) & here:
                return _kill(ranks, victims)
            delay /= 2
        seen |= here
    return False


def saving(save: Path) -> set[tuple[str, int]]:
    """Temporary directories of saves: a save in which a run was killed leaves one, and the next save of that step makes its own."""
    found = set()
    for path in save.glob(".step-*.tmp"):
        try:
            found.add((path.name, path.stat().st_ino))
        except OSError:
            continue  # renamed since
    return found


def _wait_until(is_so: Callable[[], bool], seconds: float) -> None:
    deadline = time.perf_counter() + seconds
    while not is_so() and time.perf_counter() < deadline:
        time.sleep(0.001)


def _kill(ranks: ProgramRanks, victims: Sequence[int]) -> bool:
    lived = any(ranks.exit_codes[rank] is None for rank in victims)
    ranks.kill(victims)
    return lived


def run(num_kills: int, seed: int, flags: Sequence[str] = ()) -> dict[str, object]:
    """All kills; returns the figures, of which `problems` must be empty."""
    generator = random.Random(seed)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="megalite-chaos-") as name:
        folder = Path(name)
        losses, duration = undisturbed(folder, flags)
        chaos = Chaos(folder, losses, flags, generator, duration)
        figures: dict[str, object] = {"kills": num_kills}
        counts = {"in_save": 0, "one_rank": 0, "all_ranks": 0, "async": 0}
        print(f"{'kill':>4s} {'moment':9s} {'killed':7s} {'saves':6s} {'announced':>9s} {'complete':>8s} {'others end':>11s}   verdict")
        for number in range(num_kills):
            in_save = number % 3 == 0
            victims = list(range(RANKS)) if number % 2 else [generator.randrange(RANKS)]
            row = kill_once(chaos, in_save, victims)
            counts["in_save"] += in_save
            counts["all_ranks" if number % 2 else "one_rank"] += 1
            counts["async"] += bool(row["async"])
            print(
                f"{number + 1:4d} {'in a save' if in_save else 'any':9s} {'all' if number % 2 else f'rank {victims[0]}':7s} "
                f"{'async' if row['async'] else 'sync':6s} {row['announced']:9d} {row['complete']:8d} {row['ended']!s:>11s}   "
                f"{row['verdict']}",
                flush=True,
            )
        chaos.problems += last_life(chaos)
        figures |= {**counts, "lives": chaos.life, "resumes": chaos.num_resumes, "runs_finished": chaos.run_number}
        return {**figures, "problems": chaos.problems, "seconds": round(time.perf_counter() - begin, 1)}


def last_life(chaos: Chaos) -> list[str]:
    """The run after all kills ends, with all losses and whole checkpoints."""
    from megalite.checkpoint import complete_checkpoints
    from megalite.checkpoint.compare import verify_checkpoint

    ranks, _ = chaos.begin_life()
    alive = ranks.wait(5 * LIMIT)
    found = chaos.end_life(ranks)
    if alive or any(ranks.exit_codes):
        found.append(f"the run after all kills failed: exit codes {ranks.exit_codes}, {ranks.output()[-500:]}")
    if {step for step, _ in read_losses(chaos.save)} != chaos.losses.keys():
        found.append("steps are missing from the metrics after the last run")
    for checkpoint in complete_checkpoints(chaos.save):
        found += verify_checkpoint(checkpoint).problems
    return [f"the last life: {problem}" for problem in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=60, help="number of kills (default 60)")
    parser.add_argument("--quick", action="store_true", help="3 kills")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims (default 0)")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="further flags of the run; must be last")
    arguments = parser.parse_args()
    figures = run(3 if arguments.quick else arguments.kills, arguments.seed, arguments.flags)
    print(json.dumps(figures))
    return 1 if figures["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
