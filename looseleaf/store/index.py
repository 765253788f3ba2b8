"""What a folder of records holds: a table in SQLite that several threads and processes read and write.

Reads go by a connection of their own and never wait for a writer. Whoever changes anything, or acts on what is there (a
file put in its place, moved or removed), does it inside `writing`, which one process has at a time, and looks again
there: what it read before may be another's by now. All errors are sqlite3's. What this file does not know: files of
records, budgets, clocks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from looseleaf.errors import ConfigError
from looseleaf.store.protocol import Key

SCHEMA = 1
WAIT_S = 10.0
"""For another process that writes."""
TABLE = (
    "CREATE TABLE records (identity TEXT NOT NULL, part TEXT NOT NULL, kind TEXT NOT NULL, "
    "size_bytes INTEGER NOT NULL, created_s REAL NOT NULL, expires_s REAL, used INTEGER NOT NULL, "
    "mark INTEGER NOT NULL, PRIMARY KEY (identity, part)) WITHOUT ROWID",
    "CREATE INDEX by_use ON records (used)",
)
COLUMNS = "identity, part, kind, size_bytes, created_s, expires_s, mark"
NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM records)"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One record."""

    key: Key
    kind: str
    size_bytes: int
    created_s: float
    expires_s: float | None
    mark: int = 0
    """Of this very putting, given by the index: the same key put again has another."""


class Index:
    """The table in a file; `fill` enters what is there when the table is new."""

    def __init__(self, path: Path, *, durable: bool, fill: Callable[[Index], None]):
        self._path, self._durable, self._fill = path, durable, fill
        self._read_lock, self._write_lock = threading.Lock(), threading.RLock()
        self._writes = 0
        self._open()

    def _open(self) -> None:
        self._writer, self._reader = self._connect(), self._connect()
        self._process, self._inode = os.getpid(), self._path.stat().st_ino
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA):
            raise ConfigError(f"{self._path} was written by another version of looseleaf (schema {version})")
        if self._writer.execute("PRAGMA quick_check(1)").fetchone()[0] != "ok":
            raise sqlite3.DatabaseError("its pages do not fit together")
        if version == 0:
            with self.writing():  # all of it or nothing: a crash meanwhile leaves a new table, to be filled again
                if self._writer.execute("PRAGMA user_version").fetchone()[0] == 0:
                    for line in TABLE:
                        self._writer.execute(line)
                    self._fill(self)
                    self._writer.execute(f"PRAGMA user_version={SCHEMA}")

    def find(self, key: Key) -> Entry | None:
        """What is known of a key."""
        with self._reading() as reader:
            row = reader.execute(f"SELECT {COLUMNS} FROM records WHERE identity = ? AND part = ?", key).fetchone()
        return None if row is None else _as_entry(row)

    def entries(self) -> list[Entry]:
        """Everything, least recently used first."""
        with self._reading() as reader:
            rows = reader.execute(f"SELECT {COLUMNS} FROM records ORDER BY used").fetchall()
        return [_as_entry(row) for row in rows]

    def totals(self) -> tuple[int, int]:
        """How many records, and their bytes."""
        with self._reading() as reader:
            count, size_bytes = reader.execute("SELECT COUNT(*), SUM(size_bytes) FROM records").fetchone()
        return count, size_bytes or 0

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction of this thread; all of it or nothing. May be entered again inside."""
        with self._write_lock:
            self._look()
            if self._writes:
                yield
                return
            self._writer.execute("BEGIN IMMEDIATE")
            self._writes += 1
            try:
                yield
                self._writer.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._writer.execute("ROLLBACK")
                raise
            finally:
                self._writes -= 1

    def current(self, key: Key) -> Entry | None:
        """As `find`, inside `writing`: nobody changes it meanwhile."""
        row = self._writer.execute(f"SELECT {COLUMNS} FROM records WHERE identity = ? AND part = ?", key).fetchone()
        return None if row is None else _as_entry(row)

    def size_bytes(self) -> int:
        """Of all records, inside `writing`."""
        return self._writer.execute("SELECT SUM(size_bytes) FROM records").fetchone()[0] or 0

    def oldest(self) -> Iterator[Entry]:
        """Least recently used first, inside `writing`."""
        for row in self._writer.execute(f"SELECT {COLUMNS} FROM records ORDER BY used").fetchall():
            yield _as_entry(row)

    def expired(self, now: float) -> list[Entry]:
        """What is over, inside `writing`."""
        rows = self._writer.execute(f"SELECT {COLUMNS} FROM records WHERE expires_s <= ?", (now,)).fetchall()
        return [_as_entry(row) for row in rows]

    def enter(self, entry: Entry) -> None:
        """A record, as the most recently used and with a mark of its own, inside `writing`."""
        self._writer.execute(
            f"INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, {NEXT}, ?)",
            (*entry.key, entry.kind, entry.size_bytes, entry.created_s, entry.expires_s, secrets.randbits(62)),
        )

    def touch(self, key: Key) -> None:
        """It is the most recently used now, inside `writing`."""
        self._writer.execute(f"UPDATE records SET used = {NEXT} WHERE identity = ? AND part = ?", key)

    def remove(self, key: Key) -> None:
        """Forget it, inside `writing`."""
        self._writer.execute("DELETE FROM records WHERE identity = ? AND part = ?", key)

    def close(self) -> None:
        """Let go of the file."""
        for connection in (self._reader, self._writer):
            connection.close()

    def _connect(self) -> sqlite3.Connection:
        index = sqlite3.connect(self._path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            index.execute("PRAGMA journal_mode=WAL")
            index.execute(f"PRAGMA synchronous={'FULL' if self._durable else 'OFF'}")
        except BaseException:
            index.close()
            raise
        return index

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        self._look()
        with self._read_lock:
            yield self._reader

    def _look(self) -> None:
        """Open it again where this is a forked process, or somebody put another file in its place."""
        if self._writes:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._process == os.getpid() and self._path.stat().st_ino == self._inode:
                return
        with self._write_lock, self._read_lock:
            if self._process == os.getpid():
                self.close()
            self._open()


def _as_entry(row: tuple[str, str, str, int, float, float | None, int]) -> Entry:
    identity, part, kind, size_bytes, created_s, expires_s, mark = row
    return Entry(
        key=Key(identity, part), kind=kind, size_bytes=size_bytes, created_s=created_s, expires_s=expires_s, mark=mark
    )
