"""Which documents a training step read, and which steps read a document: from a run's saved configuration.

    python tools/provenance.py runs/x --step 12                    everything that step 12 trained on
    python tools/provenance.py runs/x --step 12 --micro-batch 3    one micro-batch of it, of the global batch
    python tools/provenance.py runs/x --sample 4711 --decode       one sample, with its text
    python tools/provenance.py runs/x --document 17                where document 17 is read in the whole run
    python tools/provenance.py runs/x --document 17 --dataset data/web --split valid

RUN is the folder that the run saved to, or its config.toml. The batch size, the data, the seed and the split decide the
order; the layout does not. A run that was continued with another batch size is refused. Steps count from 1 as in the log;
with --split valid or test they are the batches of an evaluation, and every evaluation reads the same ones. Printed are
rows of tokens and bytes of PREFIX.bin; a row at position S of a sample is only the last label. --decode needs the
tokenizer of the run, or --tokenizer-type and --tokenizer-model. The last line of standard output is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.config import RunConfig
from megalite.data.dataset_meta import read_meta
from megalite.data.provenance import Provenance, Use
from megalite.data.tokenizer import Tokenizer, build_tokenizer
from megalite.errors import ConfigError, DataError, MegaliteError

_SHOWN_TEXT = 100


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 for data that cannot be used or what the run does not have, 2 for wrong settings."""
    arguments = _parse(argv)
    try:
        config = read_config(Path(arguments.run))
        provenance = Provenance.of_run(config, arguments.split, arguments.world_size)
        if arguments.split == "train":
            check_history(Path(arguments.run), provenance)
        uses = find(provenance, arguments)
        tokenizer = _tokenizer(config, arguments, uses) if arguments.decode else None
        rows = [_row(provenance, use, tokenizer) for use in uses]
    except MegaliteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    _print_table(rows, arguments.limit)
    print(json.dumps(_summary(config, arguments, provenance, rows)))
    return 0


def read_config(run: Path) -> RunConfig:
    """The saved configuration of a run. Raises ConfigError."""
    path = run / "config.toml" if run.is_dir() else run
    try:
        return RunConfig.from_toml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; give the --save folder of a run, or its config.toml") from error


def check_history(run: Path, provenance: Provenance) -> None:
    """Raises DataError where the run's metrics, if they lie beside it, show steps of other sizes than its configuration says."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the last line of a run that was killed
        if "consumed_samples" not in record:
            continue
        step, consumed = record["step"], record["consumed_samples"]
        expected = provenance.batch_sizes.consumed_before(step)
        if consumed != expected:
            raise DataError(
                f"{path}: {consumed} samples were consumed after step {step}, by the configuration it would be {expected}: the run was "
                "continued with other batch sizes, and no single configuration says what its steps read"
            )


def find(provenance: Provenance, arguments: argparse.Namespace) -> list[Use]:
    """What was asked for. Raises DataError."""
    if arguments.document is not None:
        return provenance.of_document(arguments.document, arguments.dataset)
    if arguments.sample is not None:
        return provenance.of_sample(arguments.sample)
    return provenance.of_step(arguments.step, arguments.micro_batch)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="provenance.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN", help="folder of the run, or its config.toml")
    question = parser.add_mutually_exclusive_group(required=True)
    question.add_argument("--step", type=int, help="step, from 1")
    question.add_argument("--sample", type=int, help="sample, from 0 in the order of the run")
    question.add_argument("--document", type=int, help="document, from 0 in its dataset")
    parser.add_argument("--micro-batch", type=int, help="with --step: micro-batch of the global batch, from 0")
    parser.add_argument("--dataset", help="with --document: its prefix, needed in a blend")
    parser.add_argument("--split", choices=("train", "valid", "test"), default="train")
    parser.add_argument("--decode", action="store_true", help="print the text")
    parser.add_argument("--tokenizer-type", help="for --decode; not set: the run's")
    parser.add_argument("--tokenizer-model", help="for --decode; not set: the run's")
    parser.add_argument("--world-size", type=int, help="ranks of the run, where its configuration does not set the global batch size")
    parser.add_argument("--limit", type=int, default=50, help="rows to print (default 50); the JSON line has all")
    arguments = parser.parse_args(argv)
    if arguments.micro_batch is not None and arguments.step is None:
        parser.error("--micro-batch is a part of a --step")
    if arguments.dataset is not None and arguments.document is None:
        parser.error("--dataset is for --document")
    return arguments


def _tokenizer(config: RunConfig, arguments: argparse.Namespace, uses: list[Use]) -> Tokenizer:
    """The one that was named, the run's, or the one that the dataset's side file names and that has no file."""
    if arguments.tokenizer_type is not None:
        return build_tokenizer(arguments.tokenizer_type, arguments.tokenizer_model)
    if config.data.tokenizer_type is not None:
        return build_tokenizer(config.data.tokenizer_type, arguments.tokenizer_model or config.data.tokenizer_model)
    meta = read_meta(uses[0].dataset) if uses else None
    if meta is not None and meta.tokenizer != "bytes":
        kind, name = meta.tokenizer.split(":", 1) if ":" in meta.tokenizer else (meta.tokenizer, "...")
        flags = f"--tokenizer-type {kind} --tokenizer-model {name}"
        raise ConfigError(f"the run has no tokenizer, its data was made with {meta.tokenizer}: say where that is, {flags}")
    if meta is None and uses:
        raise ConfigError("neither the run nor its data says which tokenizer was used: --tokenizer-type ... --tokenizer-model ...")
    return build_tokenizer("bytes")


def _row(provenance: Provenance, use: Use, tokenizer: Tokenizer | None) -> dict[str, object]:
    row: dict[str, object] = use._asdict()
    if tokenizer is not None:
        row["text"] = tokenizer.decode(provenance.tokens(use).tolist())
    return row


def _print_table(rows: list[dict[str, object]], limit: int) -> None:
    print(f"{'step':>8} {'micro':>6} {'row':>4} {'sample':>10} {'position':>8} {'document':>10} {'tokens':>21} {'bytes':>29}  dataset")
    for row in rows[:limit]:
        tokens, span = f"{row['start']}..{row['stop']}", f"{row['first_byte']}..{row['end_byte']}"
        print(
            f"{row['step']:>8} {row['micro_batch']:>6} {row['row']:>4} {row['sample']:>10} {row['position']:>8} {row['document']:>10} "
            f"{tokens:>21} {span:>29}  {row['dataset']}"
        )
        if "text" in row:
            text = json.dumps(row["text"], ensure_ascii=False)
            print(f"         {text if len(text) <= _SHOWN_TEXT else text[:_SHOWN_TEXT] + '...'}")
    if not rows:
        print("nothing: this split does not read it in this run")
    if len(rows) > limit:
        print(f"... and {len(rows) - limit} more rows (--limit)")


def _summary(config: RunConfig, arguments: argparse.Namespace, provenance: Provenance, rows: list[dict[str, object]]) -> dict[str, object]:
    asked = {name: getattr(arguments, name) for name in ("step", "micro_batch", "sample", "document", "dataset")}
    summary: dict[str, object] = {
        "split": arguments.split,
        "asked": {name: value for name, value in asked.items() if value is not None},
        "steps": sorted({row["step"] for row in rows}),  # type: ignore[type-var]
        "samples": len({row["sample"] for row in rows}),
        "tokens": sum(int(row["stop"]) - int(row["start"]) for row in rows),  # type: ignore[call-overload]
        "steps_of_split": provenance.num_steps,
        "uses": rows,
    }
    if arguments.split == "valid":
        interval, last = config.train.eval_interval, config.train.train_iters
        assert interval is not None
        summary["evaluated_after_steps"] = sorted({*range(interval, last + 1, interval), last})
    return summary


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
