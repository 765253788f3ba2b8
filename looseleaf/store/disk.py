"""Records in a folder: one file each, found by an index, least recently used ones leave first.

    FOLDER/records/ab/abcd….safetensors   one record (format.py); the name is a digest of its key
    FOLDER/index.sqlite                   what is there, how large, until when, when it was last used (index.py)
    FOLDER/writing/                       files that are not finished: nobody reads them
    FOLDER/damaged/                       the last files that were not what the index said, for people to look at

A file is written aside, flushed to the medium, renamed, and only then entered in the index: what is half written is
never seen, and what `put` said yes to is there after any crash. A file that is torn, altered or another's is a miss,
counted and put aside. Several processes may use one folder. Budgets count the records' bytes, not the headers'. Nothing
a medium or an index does escapes from here: it is a miss, or a no, and counted.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch

from looseleaf.checks import check_number, check_whole
from looseleaf.errors import ConfigError, LooseleafError
from looseleaf.kv.records import Record
from looseleaf.store import format as files
from looseleaf.store.format import DamagedError, Manifest
from looseleaf.store.index import Entry, Index
from looseleaf.store.medium import Medium
from looseleaf.store.protocol import Key, StoreStats

log = logging.getLogger(__name__)

MOST_DAMAGED = 64
"""Files kept in `damaged`, the newest."""
TOKEN = secrets.token_hex(4)
"""Of this process among others that had or have its number."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a look at every file brought to light."""

    good: int
    damaged: dict[Path, str]
    """Files put aside, and why."""
    unreadable: dict[Path, str]
    """Files the medium would not give, left where they are."""
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
        self.folder, self.budget_bytes, self.medium = folder, budget_bytes, medium or Medium()
        self._device, self._clock = device, clock
        self._lock = threading.Lock()
        self._numbers = count()
        self._counts = StoreStats(budget_bytes=budget_bytes)
        self._touched: dict[Key, None] = {}
        """Read since the index was last written, in order."""
        self._closed = False
        try:
            for name in ("records", "writing", "damaged"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            self._index = self._open_index()
            self._sweep()
        except (OSError, ValueError, sqlite3.Error) as error:
            raise ConfigError(f"the store folder {str(folder)!r} cannot be used: {error}") from error

    def get(self, key: Key) -> Record | None:
        """The record under this key, now the most recently used; None when absent, expired or damaged."""
        found = self.fetch(key)
        return None if found is None else found[0]

    def fetch(self, key: Key) -> tuple[Record, float | None] | None:
        """The same, with the seconds it has left to live."""
        entry = self._live(key)
        found = None if entry is None else self._read(entry)
        self._count(hits=found is not None, misses=found is None)
        if entry is None or found is None:
            return None
        self.touch(key)
        if entry.expires_s is None:
            return found, None
        # a clock that was set back makes nothing live longer than it was meant to
        return found, min(entry.expires_s - self._clock(), entry.expires_s - entry.created_s)

    def touch(self, key: Key) -> None:
        """It was used, here or in front of this store; written down with the next change."""
        with self._lock:
            self._touched.pop(key, None)
            self._touched[key] = None

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Nothing to do: whoever puts memory in front of it does."""

    def flush(self) -> None:
        """Nothing to do: what `put` said yes to is on the medium."""

    def put(self, key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        """Keep a record, evicting the least recently used; False when it does not fit or cannot be written."""
        if ttl_s is not None:
            check_number("ttl_s", ttl_s, low=0)
        size_bytes = files.size_of(record)
        if self._closed or size_bytes > self.budget_bytes:
            self._count(refused=1)
            return False
        now = self._clock()
        expires_s = None if ttl_s is None else now + ttl_s
        aside = self.folder / "writing" / f"{os.getpid()}-{TOKEN}-{next(self._numbers)}"
        try:
            with self.medium.writing(aside) as file:
                files.write(file, key, record, created_s=now, expires_s=expires_s)
                self.medium.flush(file)
            self._enter(Entry(key=key, kind=files.kind_of(record), size_bytes=size_bytes, created_s=now,
                              expires_s=expires_s), aside)  # fmt: skip
        except Exception as error:  # a medium, an index, a device that has no memory left
            log.warning("a record could not be stored: %r", error)
            self._count(refused=1, faults=1)
            return False
        finally:
            with contextlib.suppress(OSError):
                aside.unlink(missing_ok=True)
        return True

    def contains(self, key: Key) -> bool:
        """Whether the index has it, without counting or touching anything."""
        entry = self._entry(key)
        return entry is not None and not self._is_over(entry)

    def delete(self, key: Key) -> bool:
        """Forget a record and its file; whether there was one."""
        entry = self._live(key)
        return entry is not None and self._remove(entry)

    def entries(self) -> list[Entry]:
        """Everything the index has, least recently used first."""
        with self._guarded():
            self._note_use()
            return self._index.entries()

    def path(self, key: Key) -> Path:
        """Where a key's file is, or would be."""
        name = hashlib.sha256(f"{len(key.identity)}:{key.identity}/{key.part}".encode()).hexdigest()
        return self.folder / "records" / name[:2] / f"{name}.safetensors"

    def collect(self) -> int:
        """Drop what has expired, is beyond the budget, was left half done or put aside; how many records went."""
        with self._guarded():
            self._adopt(self._strays())
            before = self._index.totals()[0]
            with self._changing() as doomed:
                doomed += self._index.expired(self._clock())
                self._make_room(0, doomed)
            self._sweep()
            for path in (self.folder / "damaged").iterdir():
                path.unlink(missing_ok=True)
            return before - self._index.totals()[0]

    def verify(self, tell: Callable[[str], None] = lambda stage: None) -> Found:
        """Read every file, put damaged ones aside, and make the index agree with what is there."""
        damaged, unreadable = {}, {}
        with contextlib.suppress(LooseleafError):
            self.entries()  # an index that is found damaged is built anew
        with self._guarded():
            known = {self.path(entry.key): entry for entry in self.entries()}
            strays = self._strays()
            good = 0
            for number, path in enumerate([*known, *strays]):
                tell(f"file {number + 1} of {len(known) + len(strays)}")
                try:
                    self._check(path)
                    good += 1
                except FileNotFoundError:
                    continue
                except DamagedError as error:
                    if self._put_aside(path, known.get(path), str(error)):
                        damaged[path] = str(error)
                except OSError as error:
                    unreadable[path] = str(error)
            gone = [entry for path, entry in known.items() if path not in damaged and not path.exists()]
            missing = [entry.key for entry in gone if self._remove(entry)]  # else it was evicted meanwhile
            return Found(good=good, damaged=damaged, unreadable=unreadable, missing=missing,
                         adopted=self._adopt(strays), unfinished=self._sweep())  # fmt: skip

    def stats(self) -> StoreStats:
        """Counters since it was opened, and what the folder holds."""
        records = size_bytes = 0
        if not self._closed:
            with contextlib.suppress(sqlite3.Error):
                records, size_bytes = self._index.totals()
        with self._lock:
            return replace(self._counts, records=records, size_bytes=size_bytes)

    def check_integrity(self) -> None:
        """Raise AssertionError when the index does not agree with the files."""
        for entry in [] if self._closed else self.entries():
            path = self.path(entry.key)
            assert path.exists() or self._entry(entry.key) is None, f"{entry.key} has no file"
            with contextlib.suppress(FileNotFoundError):
                assert self._check(path).key == entry.key
        assert self.stats().size_bytes <= self.budget_bytes

    def close(self) -> None:
        """Write down what was used, and let go of the folder; the records stay."""
        if not self._closed:
            self._note_use()
            self._closed = True
            self._index.close()

    def _open_index(self) -> Index:
        path = self.folder / "index.sqlite"
        try:
            return Index(path, durable=self.medium.durable, fill=self._fill)
        except sqlite3.OperationalError:
            raise  # locked, or not writable: it may be fine
        except sqlite3.DatabaseError as error:
            aside = self.folder / "damaged" / f"{time.time_ns()}-index.sqlite"
            log.warning(
                "the index of %s is damaged (%s) and built anew; the old one lies in %s", self.folder, error, aside
            )
            path.rename(aside)
            for more in ("-wal", "-shm"):
                Path(f"{path}{more}").unlink(missing_ok=True)
            return Index(path, durable=self.medium.durable, fill=self._fill)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Where people ask about the folder: an index found damaged is built anew, and they are told."""
        if self._closed:
            raise LooseleafError("the store is closed")
        try:
            yield
        except sqlite3.OperationalError as error:
            raise LooseleafError(f"the index of {str(self.folder)!r} cannot be used now: {error}") from error
        except sqlite3.DatabaseError as error:
            self._index.close()
            self._index = self._open_index()
            said = f"the index of {str(self.folder)!r} was damaged ({error}) and is built anew: ask again"
            raise LooseleafError(said) from error

    def _fill(self, index: Index) -> None:
        """Enter every file that says what it is in a new index, the oldest as least recently used."""
        found = []
        for path in (self.folder / "records").glob("*/*.safetensors"):
            with contextlib.suppress(DamagedError, OSError):  # `verify` says which
                found.append(self._look(path))
        for one in sorted(found, key=lambda manifest: manifest.created_s):
            index.enter(_entry_of(one))

    def _strays(self) -> list[Path]:
        """Files the index does not have: of writers that were killed, or of rows that were deleted by hand."""
        known = {self.path(entry.key) for entry in self._index.entries()}
        return sorted(set((self.folder / "records").glob("*/*.safetensors")) - known)

    def _adopt(self, strays: Iterable[Path]) -> list[Key]:
        """Enter files that are there and in no index."""
        adopted = []
        for path in strays:
            with contextlib.suppress(DamagedError, OSError), self._index.writing():
                one = self._look(path)
                if self._index.current(one.key) is None:
                    self._index.enter(_entry_of(one))
                    adopted.append(one.key)
        return adopted

    def _sweep(self) -> int:
        """Remove files of writers that are gone."""
        removed = 0
        for path in (self.folder / "writing").iterdir():
            process, _, rest = path.name.partition("-")
            with contextlib.suppress(ValueError, OverflowError, OSError):
                own = int(process) == os.getpid()
                if not rest.startswith(TOKEN) if own else not _is_running(int(process)):
                    path.unlink()
                    removed += 1
        return removed

    def _look(self, path: Path) -> Manifest:
        """What a file says of itself, if it lies where it should."""
        with self.medium.reading(path) as file:
            manifest = files.read_manifest(file)
        if self.path(manifest.key) != path:
            raise DamagedError(f"it holds {manifest.key.part} of {manifest.key.identity}")
        return manifest

    def _check(self, path: Path) -> Manifest:
        """The same, all of it read and compared."""
        manifest = self._look(path)
        with self.medium.reading(path) as file:
            return files.read(file, manifest.key)[1]

    def _read(self, entry: Entry) -> Record | None:
        """A record's file; once more where it seems damaged, as the way from the medium may have been."""
        path = self.path(entry.key)
        try:
            try:
                with self.medium.reading(path) as file:
                    return files.read(file, entry.key, device=self._device)[0]
            except DamagedError:
                with self.medium.reading(path) as file:
                    found = files.read(file, entry.key, device=self._device)[0]
                self._count(faults=1)
                return found
        except DamagedError as error:
            self._put_aside(path, entry, str(error))
        except FileNotFoundError:
            if self._entry(entry.key) == entry:  # else somebody removed it meanwhile, as one may
                log.warning("the file of a stored record is not there: %s", path)
                self._count(faults=1)
                if not path.exists():
                    self._remove(entry)
        except Exception as error:  # a medium that fails, a device without memory
            log.warning("a stored record cannot be read, it is computed again: %r", error)
            self._count(faults=1)
        return None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Entry]]:
        """A transaction; entries appended to what it gives go, their files once that is certain."""
        doomed: list[Entry] = []
        with self._index.writing():
            with self._lock:
                touched, self._touched = self._touched, {}
            for key in touched:
                self._index.touch(key)
            yield doomed
            for entry in doomed:
                self._index.remove(entry.key)
        if doomed:
            with self._index.writing():  # nobody puts a file in such a place meanwhile
                for entry in doomed:
                    if self._index.current(entry.key) is None:
                        self.path(entry.key).unlink(missing_ok=True)

    def _note_use(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._touched:
                with self._changing():
                    pass

    def _enter(self, entry: Entry, aside: Path) -> None:
        """Move a file to its place, make room and enter it."""
        path = self.path(entry.key)
        if not path.parent.exists():
            path.parent.mkdir(exist_ok=True)
            self.medium.flush_folder(path.parent.parent)
        with self._changing() as doomed:
            before = self._index.current(entry.key)
            if before is not None:
                self._index.remove(entry.key)  # its bytes do not count any more, its file is replaced
            try:
                self._make_room(entry.size_bytes, doomed)
                self.medium.rename(aside, path)
                self._index.enter(entry)
            except BaseException:
                if before is None:
                    path.unlink(missing_ok=True)
                raise

    def _make_room(self, size_bytes: int, doomed: list[Entry]) -> None:
        """Choose who leaves, inside a transaction: what is over, then what was used least recently."""
        over = self._index.size_bytes() + size_bytes - self.budget_bytes - sum(one.size_bytes for one in doomed)
        if over <= 0:
            return
        gone = {one.key for one in doomed}
        expired = [one for one in self._index.expired(self._clock()) if one.key not in gone]
        gone |= {one.key for one in expired}
        doomed += expired
        over -= sum(one.size_bytes for one in expired)
        self._count(expired=len(expired))
        for one in self._index.oldest():
            if over <= 0:
                return
            if one.key not in gone:
                doomed.append(one)
                over -= one.size_bytes
                self._count(evictions=1)

    def _remove(self, entry: Entry) -> bool:
        """Forget this very entry; whether it was still there."""
        try:
            with self._changing() as doomed:
                there = self._index.current(entry.key) == entry
                if there:
                    doomed.append(entry)
            return there
        except (sqlite3.Error, OSError) as error:
            log.warning("a record cannot be taken out of the index of %s: %s", self.folder, error)
            self._count(faults=1)
            return False

    def _put_aside(self, path: Path, entry: Entry | None, why: str) -> bool:
        """A damaged file, unless somebody has put a new one in its place; whether it was."""
        try:
            with self._index.writing():
                now = None if entry is None else self._index.current(entry.key)
                if now != entry:
                    return False
                path.rename(self.folder / "damaged" / f"{time.time_ns()}-{path.name}")
                if entry is not None:
                    self._index.remove(entry.key)
        except (sqlite3.Error, OSError) as error:
            log.warning("a damaged file cannot be put aside: %s: %s", path, error)
            self._count(faults=1)
            return False
        log.warning("a stored file is damaged (%s) and computed again; it lies in %s: %s",
                    why, self.folder / "damaged", path.name)  # fmt: skip
        self._count(quarantined=1)
        for old in sorted((self.folder / "damaged").iterdir())[:-MOST_DAMAGED]:
            old.unlink(missing_ok=True)
        return True

    def _entry(self, key: Key) -> Entry | None:
        if self._closed:
            return None
        try:
            return self._index.find(key)
        except (sqlite3.Error, OSError) as error:
            log.warning("the index of %s cannot be read: %s", self.folder, error)
            self._count(faults=1)
            return None

    def _live(self, key: Key) -> Entry | None:
        entry = self._entry(key)
        if entry is not None and self._is_over(entry):
            self._count(expired=self._remove(entry))
            return None
        return entry

    def _is_over(self, entry: Entry) -> bool:
        return entry.expires_s is not None and self._clock() >= entry.expires_s

    def _count(self, **more: int) -> None:
        with self._lock:
            now = {name: getattr(self._counts, name) + int(by) for name, by in more.items()}
            self._counts = replace(self._counts, **now)


def _entry_of(manifest: Manifest) -> Entry:
    return Entry(
        key=manifest.key, kind=manifest.kind, size_bytes=manifest.size_bytes, created_s=manifest.created_s,
        expires_s=manifest.expires_s,
    )  # fmt: skip


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
