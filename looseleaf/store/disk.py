"""Records in a folder: one file each, found by an index, least recently used ones leave first.

    FOLDER/records/ab/abcd….safetensors   one record (format.py); the name is a digest of its key
    FOLDER/index.sqlite                   what is there, how large, until when, when it was last used
    FOLDER/writing/                       files that are not finished: nobody reads them
    FOLDER/damaged/                       files that were not what the index said, for people to look at

A file is written aside, flushed to the medium, renamed, and only then entered in the index: what is half written is
never seen, and what `put` said yes to is there after any crash. A file that is torn, altered or another's is a miss,
counted and put aside. Several processes may use one folder. Budgets count the records' bytes, not the headers'.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from looseleaf.checks import check_number, check_whole
from looseleaf.errors import ConfigError
from looseleaf.kv.records import Record
from looseleaf.store import format as files
from looseleaf.store.format import DamagedError, Manifest
from looseleaf.store.medium import Medium
from looseleaf.store.protocol import Key, StoreStats

log = logging.getLogger(__name__)

SCHEMA = 1
WAIT_S = 10.0
"""For another process that writes to the index."""
TABLE = """
CREATE TABLE IF NOT EXISTS records (
    identity TEXT NOT NULL, part TEXT NOT NULL, kind TEXT NOT NULL, size_bytes INTEGER NOT NULL,
    created_s REAL NOT NULL, expires_s REAL, used INTEGER NOT NULL, PRIMARY KEY (identity, part)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_use ON records (used);
"""
NEXT = "(SELECT COALESCE(MAX(used), 0) + 1 FROM records)"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What the index knows of a record."""

    key: Key
    kind: str
    size_bytes: int
    created_s: float
    expires_s: float | None
    path: Path


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a look at every file brought to light."""

    good: int
    damaged: dict[Path, str]
    """Files put aside, and why."""
    missing: list[Key]
    """In the index and nowhere else: taken out of it."""
    adopted: list[Key]
    """Good files the index did not have: it has them now."""
    unfinished: int
    """Files of writers that are gone, removed."""


class DiskStore:
    """A folder of records. `device`: where they are wanted when they are read."""

    def __init__(
        self, folder: Path, budget_bytes: int, *, device: torch.device | str = "cpu",
        clock: Callable[[], float] = time.time, medium: Medium | None = None,
    ):  # fmt: skip
        check_whole("store.budget_bytes", budget_bytes, low=0)
        self.folder, self.budget_bytes = folder, budget_bytes
        self._device, self._clock, self._medium = device, clock, medium or Medium()
        self._lock = threading.RLock()
        self._numbers = count()
        self._counts = StoreStats(budget_bytes=budget_bytes)
        self._touched: dict[Key, None] = {}
        """Read since the index was last written, in order."""
        self._doomed: list[Path] = []
        """Files that go with this transaction."""
        self._closed = False
        try:
            for name in ("records", "writing", "damaged"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._index = self._open_index()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the store folder {str(folder)!r} cannot be used: {error}") from error
        self._sweep()

    def get(self, key: Key) -> Record | None:
        """The record under this key, now the most recently used; None when absent, expired or damaged."""
        found = self.fetch(key)
        return None if found is None else found[0]

    def fetch(self, key: Key) -> tuple[Record, float | None] | None:
        """The same, with the seconds it has left to live."""
        with self._lock:
            entry = self._live(key)
            if entry is None:
                self._count(misses=1)
                return None
        try:
            record, manifest = self._read(entry)
        except DamagedError as error:
            self._put_aside(entry, str(error))
            self._count(misses=1)
            return None
        except FileNotFoundError:
            with self._lock:
                if self._entry(key) is not None:  # else somebody removed it meanwhile, as one may
                    self._count(faults=1)
                    if not entry.path.exists():
                        log.warning("the file of a stored record is gone: %s", entry.path)
                        self._forget([key])
                self._count(misses=1)
            return None
        except OSError as error:
            log.warning("a stored record cannot be read, it is computed again: %s", error)
            self._count(misses=1, faults=1)
            return None
        with self._lock:
            self._touched.pop(key, None)
            self._touched[key] = None
            self._count(hits=1)
        left_s = None if manifest.expires_s is None else manifest.expires_s - self._clock()
        return record, left_s

    def _read(self, entry: Entry) -> tuple[Record, Manifest]:
        """A record's file; once more where it seems damaged, as the way from the medium may have been."""
        try:
            with self._medium.reading(entry.path) as file:
                return files.read(file, entry.key, device=self._device)
        except DamagedError:
            with self._medium.reading(entry.path) as file:
                found = files.read(file, entry.key, device=self._device)
            self._count(faults=1)
            return found

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Nothing to do: whoever puts memory in front of it does."""

    def put(self, key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        """Keep a record, evicting the least recently used; False when it does not fit or cannot be written."""
        if ttl_s is not None:
            check_number("ttl_s", ttl_s, low=0)
        size_bytes = record.nbytes
        if self._closed or size_bytes > self.budget_bytes:
            self._count(refused=1)
            return False
        now = self._clock()
        expires_s = None if ttl_s is None else now + ttl_s
        aside = self.folder / "writing" / f"{os.getpid()}-{next(self._numbers)}-{threading.get_ident()}"
        try:
            with self._medium.writing(aside) as file:
                files.write(file, key, record, created_s=now, expires_s=expires_s)
                self._medium.flush(file)
            with self._lock:
                self._enter(key, record, aside, now, expires_s)
        except (OSError, sqlite3.Error) as error:
            log.warning("a record could not be stored: %s", error)
            aside.unlink(missing_ok=True)
            self._count(refused=1, faults=1)
            return False
        return True

    def contains(self, key: Key) -> bool:
        """Whether the index has it, without counting or touching anything."""
        with self._lock:
            entry = self._entry(key)
            return entry is not None and not self._is_over(entry)

    def delete(self, key: Key) -> bool:
        """Forget a record and its file; whether there was one."""
        with self._lock:
            there = self._live(key) is not None
            if there:
                self._forget([key])
            return there

    def entries(self) -> Iterator[Entry]:
        """Everything the index has, least recently used first."""
        with self._lock:
            self._note_use()
            rows = [] if self._closed else self._index.execute("SELECT * FROM records ORDER BY used").fetchall()
        yield from (self._as_entry(row) for row in rows)

    def collect(self) -> int:
        """Drop what has expired and, beyond the budget, what was used least recently; how many records went."""
        with self._lock, self._writing():
            before = self._total("COUNT(*)")
            self._drop_expired()
            self._make_room(0)
            return before - self._total("COUNT(*)")

    def verify(self, tell: Callable[[str], None] = lambda stage: None) -> Found:
        """Read every file, put damaged ones aside, and make the index agree with what is there."""
        damaged: dict[Path, str] = {}
        adopted: list[Key] = []
        known = {entry.path: entry for entry in self.entries()}
        paths = sorted(set(known) | set((self.folder / "records").glob("*/*.safetensors")))
        good = 0
        for number, path in enumerate(paths):
            tell(f"file {number + 1} of {len(paths)}")
            try:
                manifest = self._check(path)
            except FileNotFoundError:
                continue
            except (DamagedError, OSError) as error:
                damaged[path] = str(error)
                self._put_aside(known.get(path), str(error), path)
                continue
            good += 1
            if path not in known:
                with self._lock, self._writing():
                    self._insert(
                        manifest.key, manifest.kind, manifest.data_bytes, manifest.created_s, manifest.expires_s
                    )
                adopted.append(manifest.key)
        missing = [entry.key for path, entry in known.items() if not path.exists() and path not in damaged]
        with self._lock:
            self._forget(missing)
        return Found(good=good, damaged=damaged, missing=missing, adopted=adopted, unfinished=self._sweep())

    def stats(self) -> StoreStats:
        """Counters since it was opened, and what the folder holds."""
        with self._lock:
            if self._closed:
                return replace(self._counts, budget_bytes=self.budget_bytes)
            return replace(
                self._counts, records=self._total("COUNT(*)"), size_bytes=self._total("SUM(size_bytes)"),
                budget_bytes=self.budget_bytes,
            )  # fmt: skip

    def check_integrity(self) -> None:
        """Raise AssertionError when the index does not agree with the files."""
        with self._lock:
            for entry in self.entries():
                assert entry.path.exists(), f"{entry.key} has no file"
                assert self._check(entry.path).key == entry.key
            assert self.stats().size_bytes <= self.budget_bytes

    def close(self) -> None:
        """Write down what was used, and let go of the folder; the records stay."""
        with self._lock:
            if not self._closed:
                self._note_use()
                self._closed = True
                self._index.close()

    def _open_index(self) -> sqlite3.Connection:
        path = self.folder / "index.sqlite"
        fresh = not path.exists()
        try:
            index = self._connect(path)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise  # locked, or not writable: it may be fine
            aside = self.folder / "damaged" / f"index-{time.time_ns()}.sqlite"
            log.warning("the index of %s is damaged and built anew; the old one lies in %s", self.folder, aside)
            path.rename(aside)
            for more in ("-wal", "-shm"):
                Path(f"{path}{more}").unlink(missing_ok=True)
            index, fresh = self._connect(path), True
        self._index = index
        if fresh:
            self._adopt_all()
        return index

    def _connect(self, path: Path) -> sqlite3.Connection:
        index = sqlite3.connect(path, timeout=WAIT_S, isolation_level=None, check_same_thread=False)
        try:
            index.execute("PRAGMA journal_mode=WAL")
            index.execute(f"PRAGMA synchronous={'FULL' if self._medium.durable else 'OFF'}")
            version = index.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA):
                raise ConfigError(f"{path} was written by another version of looseleaf (schema {version})")
            index.executescript(TABLE)
            index.execute(f"PRAGMA user_version={SCHEMA}")
        except BaseException:
            index.close()
            raise
        return index

    def _adopt_all(self) -> None:
        """Enter every file that can be read in a new index, the oldest as least recently used."""
        found: list[Manifest] = []
        for path in (self.folder / "records").glob("*/*.safetensors"):
            try:
                with path.open("rb") as file:
                    found.append(files.read_manifest(file))
            except (DamagedError, OSError) as error:
                self._put_aside(None, str(error), path)
        with self._writing():
            for one in sorted(found, key=lambda manifest: manifest.created_s):
                self._insert(one.key, one.kind, one.data_bytes, one.created_s, one.expires_s)

    def _sweep(self) -> int:
        """Remove files of writers that are gone."""
        removed = 0
        for path in (self.folder / "writing").iterdir():
            with contextlib.suppress(ValueError, OSError):
                if not _is_running(int(path.name.partition("-")[0])):
                    path.unlink()
                    removed += 1
        return removed

    def _path(self, key: Key) -> Path:
        name = hashlib.sha256(f"{key.identity}/{key.part}".encode()).hexdigest()
        return self.folder / "records" / name[:2] / f"{name}.safetensors"

    def _check(self, path: Path) -> Manifest:
        """A file's manifest, all of it read and compared."""
        with path.open("rb", buffering=0) as file:
            manifest = files.read_manifest(file)
            if self._path(manifest.key) != path:
                raise DamagedError(f"it holds {manifest.key.part} of {manifest.key.identity}")
            file.seek(0)
            return files.read(file, manifest.key)[1]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction, with what was used since the last one; all of it or nothing."""
        self._index.execute("BEGIN IMMEDIATE")
        try:
            for key in self._touched:
                self._index.execute(f"UPDATE records SET used = {NEXT} WHERE identity = ? AND part = ?", key)
            yield
            # last of all, but while nobody else may put a new file in such a place
            for path in self._doomed:
                path.unlink(missing_ok=True)
            self._index.execute("COMMIT")
            self._touched.clear()
        except BaseException:
            self._index.execute("ROLLBACK")
            raise
        finally:
            self._doomed.clear()

    def _note_use(self) -> None:
        if self._touched and not self._closed:
            with contextlib.suppress(sqlite3.Error), self._writing():
                pass

    def _enter(self, key: Key, record: Record, aside: Path, created_s: float, expires_s: float | None) -> None:
        """Make room, move the file to its place and enter it."""
        path = self._path(key)
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            self._medium.flush_folder(path.parent.parent)
        with self._writing():
            self._index.execute("DELETE FROM records WHERE identity = ? AND part = ?", key)
            room = record.nbytes
            if self._total("SUM(size_bytes)") + room > self.budget_bytes:
                self._drop_expired()
            self._make_room(room)
            self._medium.rename(aside, path)
            self._insert(key, files.kind_of(record), room, created_s, expires_s)

    def _insert(self, key: Key, kind: str, size_bytes: int, created_s: float, expires_s: float | None) -> None:
        self._index.execute(
            f"INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?, ?, {NEXT})",
            (*key, kind, size_bytes, created_s, expires_s),
        )

    def _make_room(self, size_bytes: int) -> None:
        while self._total("SUM(size_bytes)") + size_bytes > self.budget_bytes:
            row = self._index.execute("SELECT * FROM records ORDER BY used LIMIT 1").fetchone()
            self._drop(self._as_entry(row))
            self._count(evictions=1)

    def _drop_expired(self) -> None:
        rows = self._index.execute("SELECT * FROM records WHERE expires_s <= ?", (self._clock(),)).fetchall()
        for row in rows:
            self._drop(self._as_entry(row))
        self._count(expired=len(rows))

    def _drop(self, entry: Entry) -> None:
        self._index.execute("DELETE FROM records WHERE identity = ? AND part = ?", entry.key)
        self._doomed.append(entry.path)

    def _forget(self, keys: list[Key]) -> None:
        if keys and not self._closed:
            with self._writing():
                for key in keys:
                    self._index.execute("DELETE FROM records WHERE identity = ? AND part = ?", key)
                    self._doomed.append(self._path(key))

    def _put_aside(self, entry: Entry | None, why: str, path: Path | None = None) -> None:
        path = path or (entry.path if entry is not None else None)
        assert path is not None
        with self._lock:
            log.warning("a stored file is damaged (%s); it is computed again, the file lies in %s: %s",
                        why, self.folder / "damaged", path.name)  # fmt: skip
            with contextlib.suppress(OSError):
                path.rename(self.folder / "damaged" / f"{time.time_ns()}-{path.name}")
            if entry is not None:
                self._forget([entry.key])
            self._count(quarantined=1)

    def _entry(self, key: Key) -> Entry | None:
        if self._closed:
            return None
        try:
            row = self._index.execute("SELECT * FROM records WHERE identity = ? AND part = ?", key).fetchone()
        except sqlite3.Error as error:
            log.warning("the index of %s cannot be read: %s", self.folder, error)
            self._count(faults=1)
            return None
        return None if row is None else self._as_entry(row)

    def _live(self, key: Key) -> Entry | None:
        entry = self._entry(key)
        if entry is not None and self._is_over(entry):
            self._forget([key])
            self._count(expired=1)
            return None
        return entry

    def _is_over(self, entry: Entry) -> bool:
        return entry.expires_s is not None and self._clock() >= entry.expires_s

    def _as_entry(self, row: tuple[str, str, str, int, float, float | None, int]) -> Entry:
        identity, part, kind, size_bytes, created_s, expires_s, _ = row
        key = Key(identity, part)
        return Entry(
            key=key, kind=kind, size_bytes=size_bytes, created_s=created_s, expires_s=expires_s, path=self._path(key)
        )

    def _total(self, what: str) -> int:
        return int(self._index.execute(f"SELECT {what} FROM records").fetchone()[0] or 0)

    def _count(self, **more: int) -> None:
        with self._lock:
            now = {name: getattr(self._counts, name) + by for name, by in more.items()}
            self._counts = replace(self._counts, **now)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
