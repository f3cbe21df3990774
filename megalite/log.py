"""Logging: rank-prefixed lines on standard error, and lines that only one rank says.

Decisions: the standard `logging` module under the name "megalite"; rank 0 logs at INFO, all other ranks only at WARNING and above, with
their rank in front, so that a run of a thousand ranks reads like a run of one. Nothing is configured at import; a program calls
`configure_logging` once.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

__all__ = ["configure_logging", "get_logger"]


def get_logger(name: str = "megalite") -> logging.Logger:
    """The logger of a module; `name` is usually `__name__`."""
    return logging.getLogger(name if name.startswith("megalite") else f"megalite.{name}")


class _StandardError(logging.StreamHandler):
    """Writes to what `sys.stderr` is when a line is written: it may have been replaced (by a progress display) or closed since."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:
        return sys.stderr


def configure_logging(rank: int, world_size: int, level: int = logging.INFO) -> None:
    """Send megalite's log lines to standard error; ranks other than 0 only warn, and say who they are."""
    prefix = f"[rank {rank}] " if world_size > 1 and rank != 0 else ""
    handler = _StandardError()
    handler.setFormatter(logging.Formatter(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger = logging.getLogger("megalite")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    logger.addHandler(handler)
    logger.setLevel(level if rank == 0 else max(level, logging.WARNING))
    logger.propagate = False
