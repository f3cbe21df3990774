"""All ways to lay a number of ranks out: the rows of the parity matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megalite.config import SHARDING_STRATEGIES, RunConfig
from megalite.pipeline.schedules import SCHEDULES

__all__ = ["WHOLE_BACKWARD", "Layout", "factorisations", "layouts"]

WHOLE_BACKWARD = ("gpipe", "1f1b", "interleaved-1f1b")
"""Schedules of the matrix unless others are asked for."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One row of the matrix. zero is 0 where dp is 1, sequence_parallel False where tp is 1, schedule 1f1b where pp is 1.

    replicas: copies of a sharded model (hybrid sharding).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    tied: bool = False
    replicas: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def arithmetic(self) -> tuple[int, int, int, int, bool, bool]:
        """Layouts that agree in this must agree bit for bit: pp and schedule only change who computes, and when."""
        return self.tp, self.dp, self.replicas, self.zero, self.sequence_parallel, self.tied

    def __str__(self) -> str:
        parts = [f"tp{self.tp} pp{self.pp} dp{self.dp}"]
        parts += [f"zero{self.zero}"] if self.dp > 1 else []
        parts += [f"{self.replicas} replicas"] if self.replicas > 1 else []
        parts += [self.schedule] if self.pp > 1 else []
        parts += ["sp" if self.sequence_parallel else "no sp"] if self.tp > 1 else []
        return " ".join([*parts, "tied" if self.tied else "untied"])

    @property
    def num_chunks(self) -> int:
        """Model chunks per rank: the fewest that the schedule runs with, 1 or 2."""
        enough = 2 * self.pp  # micro-batches: their number is not what is asked here
        return 2 if SCHEDULES[self.schedule].violations(self.pp, enough, 1) else 1

    def apply(self, config: RunConfig) -> RunConfig:
        """`config` laid out like this."""
        parallel = replace(
            config.parallel,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            data_parallel_sharding_strategy=SHARDING_STRATEGIES[self.zero],
            data_parallel_replicate_size=self.replicas,
            sequence_parallel=self.sequence_parallel,
            pipeline_schedule=self.schedule,
            num_virtual_stages_per_pipeline_rank=self.num_chunks,
            pipeline_layer_split=None,
        )
        model = replace(config.model, untie_embeddings_and_output_weights=not self.tied)
        return replace(config, parallel=parallel, model=model)


def factorisations(num_ranks: int) -> list[tuple[int, int, int]]:
    """All (tp, pp, dp) whose product is `num_ranks`."""
    return [
        (tp, pp, num_ranks // tp // pp)
        for tp in range(1, num_ranks + 1)
        if num_ranks % tp == 0
        for pp in range(1, num_ranks // tp + 1)
        if num_ranks // tp % pp == 0
    ]


def layouts(
    num_ranks: int,
    *,
    zeros: tuple[int, ...] = (0, 3),
    tied: tuple[bool, ...] = (False, True),
    schedules: tuple[str, ...] = WHOLE_BACKWARD,
) -> Iterator[Layout]:
    """Every layout of `num_ranks` ranks over zero, schedule, sequence parallelism and tying (where they make a difference)."""
    for is_tied in tied:
        for tp, pp, dp in factorisations(num_ranks):
            for zero in zeros if dp > 1 else (0,):
                for schedule in schedules if pp > 1 else ("1f1b",):
                    for sequence_parallel in (False, True) if tp > 1 else (False,):
                        yield Layout(
                            tp=tp,
                            pp=pp,
                            dp=dp,
                            zero=zero,
                            schedule=schedule,
                            sequence_parallel=sequence_parallel,
                            tied=is_tied,
                        )
