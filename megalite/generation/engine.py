"""One model, many clients: requests wait in a queue and are computed one after another by one thread.

Decisions
- A request is a batch by itself (its prompts and samples); it is not mixed with others, so its text depends on nothing but itself.
- What is told to the client is an event per piece of text, handed to the request's own `emit` in the computing thread.
- A client that has gone away is noticed at the next token, and its rows end there.
- The queue has an end: a request beyond it is refused at once rather than after its client has given up.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from megalite.config import RunConfig
from megalite.data.tokenizer import Tokenizer
from megalite.errors import ConfigError, MegaliteError
from megalite.generation.request import CompletionRequest
from megalite.generation.sample import generate_batch
from megalite.generation.text import TextStream, prompt_ids
from megalite.log import get_logger
from megalite.model import GPTStage

__all__ = ["Engine", "Event", "Job", "QueueFullError"]


class QueueFullError(MegaliteError):
    """More requests are waiting than the server lets wait."""


@dataclass(frozen=True)
class Event:
    """A piece of the text of one row; with `finish` its last one. row -1: the request failed, and `text` says why."""

    row: int
    text: str
    finish: Literal["stop", "length", "failed"] | None = None


@dataclass
class Job:
    """A request under way. rows: prompt ids of every row; num_new: tokens that were computed so far."""

    request: CompletionRequest
    rows: list[list[int]]
    emit: Callable[[Event], None]
    num_new: int = 0
    is_cancelled: threading.Event = field(default_factory=threading.Event)


class Engine:
    """stage: the whole model; config: of the run that it is from. most_waiting: requests in the queue."""

    def __init__(
        self, stage: GPTStage, config: RunConfig, tokenizer: Tokenizer, *, most_waiting: int = 64, int8_cache: bool = False
    ) -> None:
        self._stage, self._tokenizer, self._int8_cache = stage, tokenizer, int8_cache
        self.longest = config.model.max_position_embeddings
        self._queue: queue.Queue[Job | None] = queue.Queue(most_waiting)
        self._thread = threading.Thread(target=self._serve, name="generation", daemon=True)
        self._thread.start()

    def prepare(self, request: CompletionRequest, emit: Callable[[Event], None]) -> Job:
        """Read the prompts. Raises ConfigError or DataError for what the model cannot read."""
        rows = [list(self._ids(prompt)) for prompt in request.prompts for _ in range(request.num_samples)]
        most, new = max(map(len, rows)), request.sampling.max_new_tokens
        if self.longest is not None and most + new > self.longest:
            raise ConfigError(f"a prompt has {most} tokens and max_tokens is {new}: this model reads {self.longest} in all")
        vocab_size = self._stage.config.known_vocab_size
        outside = [token for row in rows for token in row if not 0 <= token < vocab_size]
        if outside:
            raise ConfigError(f"the prompt holds token {outside[0]}, the vocabulary ends at {vocab_size - 1}")
        return Job(request, rows, emit)

    def submit(self, job: Job) -> None:
        """Raises QueueFullError."""
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise QueueFullError(f"{self._queue.maxsize} requests are waiting already: try again later") from None

    def close(self) -> None:
        """Finish what was submitted and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return prompt_ids(prompt, self._tokenizer) if isinstance(prompt, str) else prompt

    def _serve(self) -> None:
        while (job := self._queue.get()) is not None:
            if job.is_cancelled.is_set():
                continue
            try:
                self._compute(job)
            except Exception as error:  # one request's failure must not end the server
                get_logger().exception("a request failed")
                job.emit(Event(-1, str(error), "failed"))

    def _compute(self, job: Job) -> None:
        streams = [TextStream(self._tokenizer.decode, job.request.stops) for _ in job.rows]

        def on_token(row: int, token: int) -> bool:
            job.num_new += 1
            piece = streams[row].add(token)
            if piece:
                job.emit(Event(row, piece))
            return streams[row].is_stopped or job.is_cancelled.is_set()

        found = generate_batch(
            self._stage,
            job.rows,
            job.request.sampling,
            seeds=job.request.seeds,
            stop_id=self._tokenizer.eod_id,
            vocab_size=self._tokenizer.vocab_size,
            on_token=on_token,
            int8_cache=self._int8_cache,
        )
        for row, (stream, tokens) in enumerate(zip(streams, found, strict=True)):
            end = stream.finish()
            is_full = len(tokens) == job.request.sampling.max_new_tokens and not stream.is_stopped
            job.emit(Event(row, end, "length" if is_full else "stop"))
