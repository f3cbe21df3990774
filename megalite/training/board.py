"""What ranks tell each other about their state, through the rendezvous store: it works while collectives hang.

Decisions
- A thread of its own talks to the store, because a call does not return while the process that holds the store is stopped. Everybody
  else looks at attributes here, which never wait.
- A rank writes one small entry a second. Entries of others are read only while somebody is suspicious, in a big world less often.
- The age of an entry is the time since a reader has last seen it change, by the reader's clock: clocks of machines are never compared.
- The store is this life's own (`rendezvous`), so what an earlier life wrote is not seen.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from megalite.training.blame import Entry
from megalite.training.launch import FAILURES

__all__ = ["Board"]

_PREFIX = "megalite/watchdog"
_VERDICT, _DUMPED = f"{_PREFIX}/verdict", f"{_PREFIX}/dumped"
_ENTRIES_A_SECOND = 64  # that a rank reads at most, on average


class Board:
    """store: a connection that nothing else uses. entry: this rank's, to be replaced as a whole.

    is_reading: whether others' entries are wanted. entries, changed_at: of the ranks seen since then, and when each was last seen to
    change. answered_at: when the store last answered. has_failure: some rank is failing; verdict: of the watchdog that is ending the run.
    Times are `time.monotonic`.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, tick_s: float, entry: Entry) -> None:
        self._store, self._rank, self._tick_s, self.entry = store, rank, tick_s, entry
        self._keys = [f"{_PREFIX}/{rank}" for rank in range(world_size)]
        self._pause = max(1, round(world_size / _ENTRIES_A_SECOND / tick_s))
        self._end = threading.Event()
        self._beat = 0
        self._raw: dict[int, bytes] = {}
        self.is_reading = False
        self.reading_since: float | None = None
        self.entries: dict[int, Entry] = {}
        self.changed_at: dict[int, float] = {}
        self.answered_at = time.monotonic()
        self.has_failure = False
        self.verdict: str | None = None
        self._thread = threading.Thread(target=self._talk, name="watchdog board", daemon=True)

    @property
    def world_size(self) -> int:
        return len(self._keys)

    @property
    def ident(self) -> int | None:
        """Of the thread that talks."""
        return self._thread.ident

    def start(self) -> None:
        self._thread.start()

    def finish(self, timeout_s: float) -> None:
        """Tell the others that this rank needs nobody any more."""
        self._end.set()
        self._thread.join(timeout_s)

    def forget(self) -> None:
        """Begin to read anew: what was seen before says nothing."""
        self.reading_since = None
        self._raw, self.entries, self.changed_at = {}, {}, {}

    def claim(self, verdict: str, timeout_s: float) -> bool | None:
        """Whether this rank is the first one that fails; its verdict is then for all. None: the store does not answer."""
        answer: list[bool] = []

        def ask() -> None:
            try:
                is_first = self._store.add(FAILURES, 1) == 1
                if is_first:
                    self._store.set(_VERDICT, verdict)
            except RuntimeError:
                return
            answer.append(is_first)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(timeout_s)
        return answer[0] if answer else None

    def count_dump(self) -> None:
        """This rank has said where it stands."""
        self._store.add(_DUMPED, 1)

    def wait_for_dumps(self, number: int, timeout_s: float) -> None:
        """Until so many ranks have said where they stand."""
        end = time.monotonic() + timeout_s
        while self._store.add(_DUMPED, 0) < number and time.monotonic() < end:
            time.sleep(0.05)

    def _talk(self) -> None:
        while not self._end.wait(0 if self._beat == 0 else self._tick_s):
            with suppress(RuntimeError):  # of the store; that it does not answer is seen by `answered_at`
                self._exchange()
                self.answered_at = time.monotonic()
        with suppress(RuntimeError):
            self._write(replace(self.entry, is_finished=True))

    def _exchange(self) -> None:
        self._write(self.entry)
        if not self.has_failure or self.verdict is None:
            self.has_failure = self._store.check([FAILURES])
            if self.has_failure and self._store.check([_VERDICT]):
                self.verdict = self._store.get(_VERDICT).decode()
        if not self.is_reading:
            self.forget()
        elif self.reading_since is None or self._beat % self._pause == 0:
            self._read()
            self.reading_since = self.reading_since or time.monotonic()

    def _write(self, entry: Entry) -> None:
        self._beat += 1
        self._store.set(self._keys[self._rank], replace(entry, beat=self._beat).to_json())

    def _read(self) -> None:
        there = range(self.world_size)
        if not self._store.check(self._keys):
            there = [rank for rank in there if self._store.check([self._keys[rank]])]
        keys = [self._keys[rank] for rank in there]
        raw = self._store.multi_get(keys)
        now = time.monotonic()
        for rank, value in zip(there, raw, strict=True):
            if self._raw.get(rank) != value:
                self._raw[rank], self.changed_at[rank] = value, now
                self.entries[rank] = Entry.from_json(value)
