"""Train a GPT or Llama style language model.

One rank: python pretrain_gpt.py --mock-data --vocab-size 512

Four ranks: torchrun --nproc-per-node 4 pretrain_gpt.py --tp 2 --pp 2 --config run.toml
"""

from __future__ import annotations

import sys


def main() -> int | None:
    from megalite.cli import parse_and_validate  # settings are read and checked before torch is imported

    config = parse_and_validate(sys.argv[1:], prog="pretrain_gpt.py", description=__doc__ or "")
    from megalite.training import Launch, guard, run_training

    launch = Launch.from_environment()
    with guard(launch):
        return run_training(config, launch)


if __name__ == "__main__":
    sys.exit(main())
