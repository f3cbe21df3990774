"""Data parallelism: what is kept whole, cut and reduced over the dp axes."""

from megalite.data_parallel.shard import drop_gathered, shard_stage
from megalite.data_parallel.sync import GradientSync

__all__ = ["GradientSync", "drop_gathered", "shard_stage"]
