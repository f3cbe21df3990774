"""Build the sample indices of a run beforehand, on a machine without accelerators.

    python tools/build_index.py --config run.toml --world-size 512

Takes the settings of pretrain_gpt.py, and the number of ranks where the batch size follows from it. Reads the data as the
run will, finds what the run would not start with, and fills the index cache that the run then reads: files that change
afterwards are noticed there and indexed again. Prints what each dataset contributes; the last line of standard output is
the result as JSON. Nothing of it needs torch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

from megalite.cli import parse_run_config
from megalite.config import RunConfig
from megalite.data.corpora import Corpora, Split, known_vocab_size
from megalite.data.index_builder import native_builder
from megalite.errors import ConfigError, MegaliteError
from megalite.log import configure_logging
from megalite.validate import validate

_PROG = "build_index.py"
_WORLD_SIZE = "--world-size"


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0, 1 for data that cannot be used, 2 for wrong settings."""
    try:
        world_size, rest = _take_world_size(list(argv))
        config = parse_run_config(rest, prog=_PROG, description=(__doc__ or "").split("\n\n")[0])
        configure_logging(0, 1)
        started = time.perf_counter()
        splits = build(config, world_size)
    except MegaliteError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    for split in splits:
        print("\n".join(split.lines()))
    print(json.dumps(_summary(config, splits, time.perf_counter() - started)))
    return 0


def build(config: RunConfig, world_size: int) -> list[Split]:
    """Fill the cache with the indices that the run reads. Raises ConfigError and DataError."""
    config = config.resolve(known_vocab_size(config))
    validate(config, world_size)
    if config.data.mock_data:
        raise ConfigError("mock_data has no files to index: set --data-path")
    corpora = Corpora(config)
    return [corpora.split(name, count) for name, count in config.num_samples(config.global_batch(world_size)).items()]


def _take_world_size(argv: list[str]) -> tuple[int, list[str]]:
    """The number of ranks and the other flags. Raises ConfigError for one that is no number above 0."""
    argv = [part for text in argv for part in (text.split("=", 1) if text.startswith(f"{_WORLD_SIZE}=") else [text])]
    if _WORLD_SIZE not in argv:
        return 1, argv
    place = argv.index(_WORLD_SIZE)
    value = argv[place + 1] if place + 1 < len(argv) else ""
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{_WORLD_SIZE} {value!r} is not a number of ranks: use 1 or more")
    return int(value), argv[:place] + argv[place + 2 :]


def _summary(config: RunConfig, splits: list[Split], seconds: float) -> dict[str, object]:
    return {
        "samples": {split.name: len(split.dataset) for split in splits},
        "datasets": len({part.prefix for split in splits for part in split.parts}),
        "tokens": sum(part.tokens for split in splits for part in split.parts),
        "shuffle": config.data.shuffle,
        "cache": config.data.data_cache_path,
        "compiled": native_builder() is not None,
        "seconds": round(seconds, 3),
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
