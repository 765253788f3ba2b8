"""Memory in front of a folder: what is used is at hand, what was computed survives.

Records go into memory at once and into the folder by a thread of its own; reading takes them from memory, else from the
folder, from where they come back into memory. What will be wanted soon is brought there by a second thread while others
compute, and whoever wants it meanwhile waits for that one read. What memory evicts is still in the folder. Blocks of
prefixes stay in memory: they are many, small, and a prompt's own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from looseleaf.checks import check_number
from looseleaf.kv.records import Record, SequenceKV
from looseleaf.store.disk import DiskStore
from looseleaf.store.memory import MemoryStore
from looseleaf.store.protocol import Key, StoreStats

log = logging.getLogger(__name__)

WAITING_BYTES = 2**30
"""Records that wait to be written, together; whoever stores more waits for the medium."""


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A record on its way to the folder."""

    record: Record
    expires_at: float | None

    def left_s(self, now: float) -> float | None:
        return None if self.expires_at is None else max(0.0, self.expires_at - now)


class TieredStore:
    """A memory store over a disk store."""

    def __init__(self, memory: MemoryStore, disk: DiskStore, *, clock: Callable[[], float] = time.monotonic):
        self.memory, self.disk = memory, disk
        self._clock = clock
        self._waiting: OrderedDict[Key, _Waiting] = OrderedDict()
        self._waiting_bytes = 0
        self._news = threading.Condition()
        self._busy: Key | None = None
        self._wanted: deque[Key] = deque()
        """To be brought into memory."""
        self._coming: set[Key] = set()
        """Those, and the one that is being read."""
        self._closed = False
        self._writer: threading.Thread | None = None
        self._loader: threading.Thread | None = None
        self._hits = self._misses = self._disk_hits = 0
        self._changes = 0
        """Times something was put or deleted."""

    def get(self, key: Key) -> Record | None:
        """From memory, from those on their way to or from the folder, or from the folder."""
        with self._news:
            while key in self._coming:
                self._news.wait()
            waiting, changes = self._waiting.get(key), self._changes
        record = self.memory.get(key)
        if record is not None:
            self.disk.touch(key)
        elif waiting is not None:
            left_s = waiting.left_s(self._clock())
            record = waiting.record if left_s != 0 else None
            self._keep(key, record, left_s, changes)
        else:
            record = self._load(key, changes)
        with self._news:
            self._hits += record is not None
            self._misses += record is None
        return record

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Bring records from the folder into memory, beside whatever happens meanwhile."""
        with self._news:
            if self._closed:
                return
            for key in keys:
                if key not in self._coming and key not in self._waiting and not self.memory.contains(key):
                    self._coming.add(key)
                    self._wanted.append(key)
            if self._wanted and self._loader is None:
                self._loader = threading.Thread(target=self._fetch_wanted, name="looseleaf-load", daemon=True)
                self._loader.start()
            self._news.notify_all()

    def put(self, key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        """Into memory now, into the folder soon; False when neither takes it."""
        if ttl_s is not None:
            check_number("ttl_s", ttl_s, low=0)
        with self._news:
            self._changes += 1
        kept = self.memory.put(key, record, ttl_s=ttl_s)
        if isinstance(record, SequenceKV):
            return kept
        if record.nbytes > self.disk.budget_bytes:
            if kept:
                self._drop_below(key)  # an older one must not be taken for it
            return kept
        if not kept:
            self.memory.delete(key)  # nor here
        with self._news:
            while self._waiting and self._waiting_bytes + record.nbytes > WAITING_BYTES and not self._closed:
                self._news.wait()
            if self._closed:
                return kept
            self._take_off(key)
            self._waiting[key] = _Waiting(record, None if ttl_s is None else self._clock() + ttl_s)
            self._waiting_bytes += record.nbytes
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, name="looseleaf-store", daemon=True)
                self._writer.start()
            self._news.notify_all()
        return True

    def contains(self, key: Key) -> bool:
        """Whether `get` would answer, without counting or touching anything."""
        with self._news:
            waiting = self._waiting.get(key)
        if waiting is not None:
            return waiting.left_s(self._clock()) != 0
        return self.memory.contains(key) or self.disk.contains(key)

    def delete(self, key: Key) -> bool:
        """Forget a record everywhere; whether there was one."""
        with self._news:
            self._changes += 1
        below = self._drop_below(key)
        return self.memory.delete(key) or below

    def flush(self) -> None:
        """Wait until everything stored so far is in the folder."""
        with self._news:
            while self._waiting or self._busy is not None:
                self._news.wait()

    def stats(self) -> StoreStats:
        """What was found and what was not; records, bytes and evictions of memory; what the folder holds.

        A record expires in both, and blocks of prefixes in memory alone: the larger count is the nearer.
        """
        above, below = self.memory.stats(), self.disk.stats()
        with self._news:
            return replace(
                above, hits=self._hits, misses=self._misses, expired=max(above.expired, below.expired),
                quarantined=below.quarantined, faults=below.faults, disk_records=below.records,
                disk_bytes=below.size_bytes, disk_hits=self._disk_hits,
            )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError when either's books do not agree."""
        self.flush()
        self.memory.check_integrity()
        self.disk.check_integrity()

    def close(self) -> None:
        """Write what waits, and let go of both."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        for thread in (self._writer, self._loader):
            if thread is not None:
                thread.join()
        self.memory.close()
        self.disk.close()

    def _load(self, key: Key, changes: int) -> Record | None:
        """From the folder into memory."""
        found = self.disk.fetch(key)
        if found is None or (found[1] is not None and found[1] <= 0):
            return None
        self._keep(key, *found, changes)
        with self._news:
            self._disk_hits += 1
        return found[0]

    def _keep(self, key: Key, record: Record | None, left_s: float | None, changes: int) -> None:
        """Into memory, unless anything was put or deleted since: it might be older than what is there."""
        with self._news:
            if record is not None and changes == self._changes:
                self.memory.put(key, record, ttl_s=left_s)

    def _fetch_wanted(self) -> None:
        while True:
            with self._news:
                while not self._wanted and not self._closed:
                    self._news.wait()
                if self._closed:
                    self._coming.clear()
                    self._news.notify_all()
                    return
                key, changes = self._wanted.popleft(), self._changes
            try:
                if self.disk.contains(key):
                    self._load(key, changes)
            except Exception:  # whoever wants it reads it, or computes it
                log.exception("a record could not be read ahead")
            with self._news:
                self._coming.discard(key)
                self._news.notify_all()

    def _drop_below(self, key: Key) -> bool:
        """Out of the folder, and off the way to it; whether it was there."""
        with self._news:
            waiting = self._take_off(key)
            while self._busy == key or key in self._coming:  # it would come back: wait, then take it out again
                self._news.wait()
        return self.disk.delete(key) or waiting

    def _take_off(self, key: Key) -> bool:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._waiting_bytes -= waiting.record.nbytes
        return waiting is not None

    def _write(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closed:
                    self._news.wait()
                if not self._waiting:
                    return
                key = next(iter(self._waiting))
                one = self._waiting[key]
                self._busy = key
            left_s = one.left_s(self._clock())
            try:
                if left_s == 0 or not self.disk.put(key, one.record, ttl_s=left_s):
                    self.disk.delete(key)  # an older one must not be taken for it
            except Exception:  # it stays in memory, and is computed again some day
                log.exception("a record could not be stored")
            with self._news:
                if self._waiting.get(key) is one:  # else it was replaced meanwhile, and its turn comes again
                    self._take_off(key)
                self._busy = None
                self._news.notify_all()
