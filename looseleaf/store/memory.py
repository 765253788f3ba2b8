"""The store that needs nothing: records in this process's memory, least recently used ones leave first."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from looseleaf.checks import check_number, check_whole
from looseleaf.kv.records import Record
from looseleaf.store.protocol import Key, StoreStats


@dataclass(frozen=True, slots=True)
class _Held:
    record: Record
    size_bytes: int
    expires_at: float | None


class MemoryStore:
    """Records by reference: put and get copy nothing, so a stored tensor must not be written to again."""

    def __init__(self, budget_bytes: int, *, clock: Callable[[], float] = time.monotonic):
        check_whole("store.budget_bytes", budget_bytes, low=0)
        self.budget_bytes = budget_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._size_bytes = 0
        self._expiring = 0
        """Records that have a time to live: without any, nothing is searched for."""
        self._hits = self._misses = self._evictions = self._expired = self._refused = 0

    def get(self, key: Key) -> Record | None:
        """The record under this key, now the most recently used; None when absent or expired."""
        with self._lock:
            held = self._live(key)
            if held is None:
                self._misses += 1
                return None
            self._hits += 1
            self._held.move_to_end(key)
            return held.record

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Nothing to do: everything is at hand."""

    def put(self, key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        """Keep a record, evicting the least recently used; False when it does not fit at all."""
        if ttl_s is not None:
            check_number("ttl_s", ttl_s, low=0)
        size_bytes = record.nbytes
        with self._lock:
            if size_bytes > self.budget_bytes:
                self._refused += 1
                return False
            self._drop(key)
            if self._expiring and self._size_bytes + size_bytes > self.budget_bytes:
                self._drop_expired()
            while self._size_bytes + size_bytes > self.budget_bytes:
                self._drop(next(iter(self._held)))
                self._evictions += 1
            expires_at = None if ttl_s is None else self._clock() + ttl_s
            self._held[key] = _Held(record, size_bytes, expires_at)
            self._expiring += expires_at is not None
            self._size_bytes += size_bytes
            return True

    def contains(self, key: Key) -> bool:
        """Whether `get` would answer, without counting or touching anything."""
        with self._lock:
            held = self._held.get(key)
            return held is not None and not self._is_over(held)

    def delete(self, key: Key) -> bool:
        """Forget a record; whether there was one."""
        with self._lock:
            return self._live(key) is not None and self._drop(key)

    def flush(self) -> None:
        """Nothing to do: it does not outlive the process."""

    def stats(self) -> StoreStats:
        """Counters and sizes."""
        with self._lock:
            return StoreStats(
                records=len(self._held), size_bytes=self._size_bytes, budget_bytes=self.budget_bytes,
                hits=self._hits, misses=self._misses, evictions=self._evictions, expired=self._expired,
                refused=self._refused,
            )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not agree with the records."""
        with self._lock:
            assert self._size_bytes == sum(held.record.nbytes for held in self._held.values())
            assert self._size_bytes <= self.budget_bytes

    def close(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._held.clear()
            self._size_bytes = self._expiring = 0

    def _live(self, key: Key) -> _Held | None:
        held = self._held.get(key)
        if held is not None and self._is_over(held):
            self._drop(key)
            self._expired += 1
            return None
        return held

    def _is_over(self, held: _Held) -> bool:
        return held.expires_at is not None and self._clock() >= held.expires_at

    def _drop_expired(self) -> None:
        for key in [key for key, held in self._held.items() if self._is_over(held)]:
            self._drop(key)
            self._expired += 1

    def _drop(self, key: Key) -> bool:
        held = self._held.pop(key, None)
        if held is None:
            return False
        self._size_bytes -= held.size_bytes
        self._expiring -= held.expires_at is not None
        return True
