"""Does any fault of a store turn into a wrong record, or lose one it said it had?

A folder of records, each of which can be told from every other, and one fault after the other: bits flipped in files
and headers, files cut, lengthened, emptied, swapped, gone; indexes deleted, overwritten, cut; reads and writes that
fail as a medium does; a clock that jumps; a second process that writes and deletes; writers killed in the middle
(forked children, SIGKILL). After each, the record it hit and some others are read. `wrong`: a read brought something
else than was stored. `lost`: the store had said yes, nobody damaged that record's own file, it was neither deleted nor
expired, and it is not there. A record whose file was damaged must be a miss, and is stored again. The last kind hits a
whole system: a tiny model must answer as before from a folder whose files were damaged.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from matplotlib.figure import Figure
from PIL import Image as PILImages

from looseleaf.bench.report import BenchOptions, Report
from looseleaf.config import Config
from looseleaf.kv.records import Features, Record
from looseleaf.prompt.segments import Image, Segment
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import READ_FAULTS, WRITE_FAULTS, FaultyMedium
from looseleaf.store.protocol import Key
from looseleaf.system import Looseleaf

COUNT, QUICK_COUNT = 2_400, 120
RECORDS, SIZE = 40, 700
"""In the folder, and numbers in each."""
FAMILY = "qwen2_5_vl"
KILLED, KILLS = "writer killed", 3
"""That kind of fault, and how many times as often as the others it happens."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """A row for every kind of fault."""
    report = Report(bench="faults", options=options)
    count = options.count or (QUICK_COUNT if options.quick else COUNT)
    with tempfile.TemporaryDirectory() as folder, _quietly():
        trial = Trial(Path(folder), Random(options.seed))
        each = max(1, -(-count // (len(KINDS) + KILLS)))
        for kind, inject in KINDS.items():
            tell(kind)
            row: dict[str, Any] = {"fault": kind, "injected": 0, "wrong": 0, "lost": 0, "misses": 0}
            for _ in range(each * (KILLS if kind == KILLED else 1)):
                row["injected"] += 1
                for name, by in inject(trial).items():
                    row[name] += by
            for name, by in trial.settle().items():
                row[name] += by
            report.rows.append(row | {"quarantined": trial.quarantined, "faults": trial.faults})
            trial.quarantined = trial.faults = 0
        trial.close()
        tell("damaged files under a model")
        report.rows.append(damage_under_a_model(Path(folder) / "system", max(2, each // 10), Random(options.seed)))
    report.summary = {
        "injected": sum(row["injected"] for row in report.rows), "kinds": len(report.rows),
        "killed": next(row["injected"] for row in report.rows if row["fault"] == KILLED),
        "wrong": sum(row["wrong"] for row in report.rows), "lost": sum(row["lost"] for row in report.rows),
    }  # fmt: skip
    return report


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without a warning for every fault: they are meant."""
    log = logging.getLogger("looseleaf.store")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class Trial:
    """A folder, what should be in it, and a store that is opened again now and then."""

    def __init__(self, root: Path, chance: Random):
        self.folder = root / "store"
        self.chance = chance
        self.now = time.time()
        self.quarantined = self.faults = 0
        self.medium = FaultyMedium(seed=chance.randrange(2**30))
        self.numbers: dict[str, int] = {}
        """What the store said yes to."""
        self._last = 0
        self.store = self.open()
        for at in range(RECORDS):
            self.put(f"k{at}")

    def open(self, budget_bytes: int = 2**40) -> DiskStore:
        """The folder, once more."""
        return DiskStore(self.folder, budget_bytes, clock=lambda: self.now, medium=self.medium)

    def close(self) -> None:
        """Count what it counted, and let go of it."""
        stats = self.store.stats()
        self.quarantined += stats.quarantined
        self.faults += stats.faults
        self.store.close()

    def reopen(self) -> None:
        """As after a restart."""
        self.close()
        self.store = self.open()

    def put(self, name: str, **more: Any) -> bool:
        """Something new under a name."""
        self._last += 1
        said = self.store.put(key_of(name), record_of(name, self._last), **more)
        if said:
            self.numbers[name] = self._last
        return said

    def pick(self) -> str:
        """One of the names."""
        return self.chance.choice(list(self.numbers))

    def path(self, name: str) -> Path:
        """Where its file is."""
        return self.store.path(key_of(name))

    def check(self, name: str, *, may_miss: bool = False) -> dict[str, int]:
        """Read one, and store it again where it is gone."""
        found = self.store.get(key_of(name))
        if found is None:
            self.put(name)
            return {"misses": 1, "lost": int(not may_miss)}
        return {"wrong": int(number_of(name, found) != self.numbers[name])}

    def look(self, hit: str | None = None, *, may_miss: bool = False) -> dict[str, int]:
        """The record a fault hit, and three others that it did not."""
        total: dict[str, int] = {"wrong": 0, "lost": 0, "misses": 0}
        for name in {*([hit] if hit else []), *(self.pick() for _ in range(3))}:
            for what, by in self.check(name, may_miss=may_miss and name == hit).items():
                total[what] += by
        return total

    def settle(self) -> dict[str, int]:
        """Look at every record, store anew what is not there or wrong, and forget what was put aside."""
        wrong = lost = 0
        for name in list(self.numbers):
            found = self.check(name)
            wrong += found.get("wrong", 0)
            lost += found.get("lost", 0)
            if found.get("wrong"):
                self.put(name)
        self.reopen()
        shutil.rmtree(self.folder / "damaged")
        (self.folder / "damaged").mkdir()
        return {"wrong": wrong, "lost": lost}


def key_of(name: str) -> Key:
    """As the trial stores it."""
    return Key(name, "features")


def record_of(name: str, number: int) -> Features:
    """A record that says which one it is in every place."""
    return Features(
        embeddings=torch.full((SIZE,), number, dtype=torch.int32), deep=(torch.tensor(list(name.encode())),)
    )


def number_of(name: str, found: Record) -> int | None:
    """Which one it is; None when it is no such record."""
    if not isinstance(found, Features) or found.embeddings.shape != (SIZE,) or len(found.deep) != 1:
        return None
    first = found.embeddings[0]
    whole = bool((found.embeddings == first).all()) and bytes(found.deep[0].tolist()) == name.encode()
    return int(first) if whole else None


def _on_file(change: Callable[[Trial, bytearray, str], bytes | bytearray]) -> Callable[[Trial], dict[str, int]]:
    def inject(trial: Trial) -> dict[str, int]:
        name = trial.pick()
        path = trial.path(name)
        path.write_bytes(change(trial, bytearray(path.read_bytes()), name))
        return trial.look(name, may_miss=True)

    return inject


def _flip(trial: Trial, data: bytearray, start: int, stop: int) -> bytearray:
    data[trial.chance.randrange(start, stop)] ^= 1 << trial.chance.randrange(8)
    return data


def _header(data: bytearray) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def _another(trial: Trial, name: str) -> bytes:
    return trial.path(next(one for one in trial.numbers if one != name)).read_bytes()


def _gone(trial: Trial) -> dict[str, int]:
    name = trial.pick()
    trial.path(name).unlink()
    return trial.look(name, may_miss=True)


def _index(change: Callable[[Trial, Path], None]) -> Callable[[Trial], dict[str, int]]:
    def inject(trial: Trial) -> dict[str, int]:
        trial.close()
        change(trial, trial.folder / "index.sqlite")
        trial.store = trial.open()
        return trial.look()

    return inject


def _index_gone(trial: Trial, path: Path) -> None:
    for one in trial.folder.glob("index.sqlite*"):
        one.unlink()


def _index_overwritten(trial: Trial, path: Path) -> None:
    path.write_bytes(trial.chance.randbytes(trial.chance.randrange(1, 9000)))


def _index_cut(trial: Trial, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: trial.chance.randrange(100, len(data))])


def _index_emptied(trial: Trial) -> dict[str, int]:
    """Rows deleted by hand: `verify` finds their files again."""
    index = sqlite3.connect(trial.folder / "index.sqlite")
    with index:
        index.execute("DELETE FROM records WHERE used % 3 = ?", (trial.chance.randrange(3),))
    index.close()
    trial.store.verify()
    return trial.look()


def _reading(fault: str) -> Callable[[Trial], dict[str, int]]:
    def inject(trial: Trial) -> dict[str, int]:
        name = trial.pick()
        trial.medium.arm(fault)
        found = trial.store.get(key_of(name))  # the one that fails may miss; the next must not
        wrong = int(found is not None and number_of(name, found) != trial.numbers[name])
        total = trial.look(name)
        return total | {"wrong": total["wrong"] + wrong, "misses": total["misses"] + (found is None)}

    return inject


def _writing(fault: str) -> Callable[[Trial], dict[str, int]]:
    def inject(trial: Trial) -> dict[str, int]:
        name = trial.pick()
        trial.medium.arm(fault)
        trial.put(name)  # where it fails, what was there before stays
        return trial.look(name)

    return inject


def _clock(trial: Trial) -> dict[str, int]:
    """Years ahead and back: what expires is gone early, or stays; nothing without a time to live goes."""
    short = f"short{trial.chance.randrange(10)}"
    trial.put(short, ttl_s=60)
    trial.now += trial.chance.choice((-1, 1)) * trial.chance.uniform(10, 10**9)
    total = trial.look(short, may_miss=True)
    trial.store.delete(key_of(short))
    trial.numbers.pop(short, None)
    trial.now = time.time()
    return total


def _other_process(trial: Trial) -> dict[str, int]:
    """Another one stores, replaces what is there by something newer, and deletes its own, while this one reads."""
    replaced = [trial.pick() for _ in range(4)]
    newer = {name: trial._last + number for number, name in enumerate(replaced, 1)}
    child = os.fork()
    if child == 0:
        fine = False
        try:
            store = DiskStore(trial.folder, 2**40, clock=lambda: trial.now, medium=FaultyMedium())
            fine = all(store.put(key_of(f"other{at}"), record_of(f"other{at}", at)) for at in range(4))
            fine &= all(store.put(key_of(name), record_of(name, number)) for name, number in newer.items())
            fine &= all(store.delete(key_of(f"other{at}")) for at in range(4))
            store.close()
        finally:
            os._exit(0 if fine else 1)
    wrong = 0
    for name in [*replaced, *(trial.pick() for _ in range(4))]:
        found = trial.store.get(key_of(name))
        wrong += found is None or number_of(name, found) not in (trial.numbers[name], newer.get(name))
    failed = os.waitpid(child, 0)[1] != 0
    trial._last += len(replaced)
    trial.numbers |= newer
    total = trial.look(replaced[0])
    return total | {"wrong": total["wrong"] + wrong, "lost": total["lost"] + failed}


def _killed(trial: Trial) -> dict[str, int]:
    """A child that writes one record after the other, said through a pipe, until it is killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        store = DiskStore(trial.folder, 2**40, clock=lambda: trial.now, medium=FaultyMedium(durable=True))
        number = trial._last
        os.write(writes, b"open\n")
        while True:
            number += 1
            name = f"killed{number % 7}"
            if store.put(key_of(name), record_of(name, number)):
                os.write(writes, f"{name} {number}\n".encode())
    os.close(writes)
    with os.fdopen(reads) as said:
        said.readline()
        first = said.readline()  # so that it is killed with something said
        time.sleep(trial.chance.uniform(0.0, 0.01))
        os.kill(child, signal.SIGKILL)
        lines = [first, *said.read().splitlines()]
    os.waitpid(child, 0)
    trial.numbers |= {name: int(last) for name, last in (line.split() for line in lines)}
    trial.reopen()
    total = {"wrong": 0, "lost": 0, "misses": 0}
    for name in [name for name in trial.numbers if name.startswith("killed")]:
        found = trial.store.get(key_of(name))
        read = None if found is None else number_of(name, found)
        # the last one may have been stored without having been said
        total["lost"] += found is None
        total["wrong"] += found is not None and (read is None or read < trial.numbers[name])
        if read is not None:
            trial.numbers[name] = read
    trial._last = max(trial._last, *trial.numbers.values()) + 8
    others = trial.look()
    return {name: total[name] + others[name] for name in total}


KINDS: dict[str, Callable[[Trial], dict[str, int]]] = {
    "bit flipped in a block": _on_file(lambda trial, data, name: _flip(trial, data, _header(data), len(data))),
    "bit flipped in a header": _on_file(lambda trial, data, name: _flip(trial, data, 0, _header(data))),
    "file cut": _on_file(lambda trial, data, name: data[: trial.chance.randrange(len(data))]),
    "file lengthened": _on_file(lambda trial, data, name: data + trial.chance.randbytes(9)),
    "file emptied": _on_file(lambda trial, data, name: b""),
    "file swapped": _on_file(lambda trial, data, name: _another(trial, name)),
    "file of noise": _on_file(lambda trial, data, name: trial.chance.randbytes(len(data))),
    "file gone": _gone,
    "index gone": _index(_index_gone),
    "index overwritten": _index(_index_overwritten),
    "index cut": _index(_index_cut),
    "rows of the index gone": _index_emptied,
    **{fault: _reading(fault) for fault in READ_FAULTS},
    **{fault: _writing(fault) for fault in WRITE_FAULTS},
    "clock jumps": _clock,
    "another process": _other_process,
    KILLED: _killed,
}


def damage_under_a_model(folder: Path, count: int, chance: Random) -> dict[str, Any]:
    """Every file of a system's folder damaged in some way, again and again: it must answer as before."""
    row: dict[str, Any] = {"fault": "files under a model", "injected": 0, "wrong": 0, "lost": 0, "misses": 0}
    prompt: list[Segment] = [
        "See",
        Image(PILImages.frombytes("RGB", (84, 84), chance.randbytes(84 * 84 * 3))),
        "and what is here?",
    ]
    quarantined = 0
    expected: tuple[int, ...] | None = None
    for turn in range(count + 1):
        config = Config(store=str(folder))
        with Looseleaf.open(f"tiny:{FAMILY}", dtype="float32", config=config) as ll:
            answer = ll.ask(prompt, policy="full-reuse", max_tokens=4).token_ids
            expected = expected or answer
            row["wrong"] += answer != expected
            row["misses"] += ll.linker.counters.chunks_computed if turn else 0
            quarantined += ll.stats().quarantined
        for path in sorted((folder / "records").glob("*/*")) if turn < count else ():
            data = bytearray(path.read_bytes())
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            path.write_bytes(data)
            row["injected"] += 1
    return row | {"quarantined": quarantined, "faults": 0}


def plot(report: Report, path: Path) -> None:
    """Misses by kind of fault: what each costs."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    axes = figure.subplots()
    kinds = [row["fault"] for row in report.rows][::-1]
    shares = [row["misses"] / max(1, row["injected"]) for row in report.rows][::-1]
    axes.barh(kinds, shares, color="0.6")
    axes.set(xlabel="records computed again for one fault", title=f"{report.summary['injected']} faults: "
             f"{report.summary['wrong']} wrong, {report.summary['lost']} lost")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
