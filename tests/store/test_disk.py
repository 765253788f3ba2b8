"""A folder of records: restarts, damage, crashes, several processes. Each costs a record at most, never a wrong one."""

import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from looseleaf.errors import ConfigError
from looseleaf.kv.records import Features, Record
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import FaultyMedium
from looseleaf.store.protocol import Key

MB = 2**20


def key(name: str) -> Key:
    return Key(name, "features")


def record(number: int, size: int = 1000) -> Features:
    return Features(embeddings=torch.full((size,), number, dtype=torch.int32))


def number(found: Record | None) -> int | None:
    if found is None:
        return None
    assert isinstance(found, Features)
    assert (found.embeddings == found.embeddings[0]).all()
    return int(found.embeddings[0])


def opened(folder: Path, budget: int = MB) -> DiskStore:
    return DiskStore(folder, budget)


def filled(folder: Path, count: int = 5) -> DiskStore:
    store = opened(folder)
    for at in range(count):
        assert store.put(key(f"k{at}"), record(at))
    return store


def path_of(store: DiskStore, name: str) -> Path:
    return next(entry.path for entry in store.entries() if entry.key == key(name))


def test_what_was_stored_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    filled(tmp_path).close()
    again = opened(tmp_path)
    assert [number(again.get(key(f"k{at}"))) for at in range(5)] == [0, 1, 2, 3, 4]
    assert again.stats().size_bytes == 5 * 4000


def test_what_was_used_last_stays_longest_across_restarts(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store.get(key("k0"))
    store.close()
    again = DiskStore(tmp_path, 5 * 4000)
    again.put(key("new"), record(9))
    assert [again.contains(key(f"k{at}")) for at in range(5)] == [True, False, True, True, True]


def test_a_smaller_budget_is_kept_to_when_asked(tmp_path: Path) -> None:
    filled(tmp_path).close()
    again = DiskStore(tmp_path, 2 * 4000)
    assert again.collect() == 3
    assert [entry.key.identity for entry in again.entries()] == ["k3", "k4"]
    assert len(list((tmp_path / "records").glob("*/*"))) == 2


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "swap", "header", "other"])
def test_a_damaged_file_is_a_miss_and_put_aside(tmp_path: Path, damage: str) -> None:
    store = filled(tmp_path)
    path, other = path_of(store, "k1"), path_of(store, "k2")
    data = bytearray(path.read_bytes())
    match damage:
        case "flip":
            data[-7] ^= 4
        case "cut":
            data = data[:-100]
        case "empty":
            data.clear()
        case "header":
            data[40] ^= 1
        case "swap":
            data = bytearray(other.read_bytes())
        case "other":
            data = bytearray(b"something else")
    path.write_bytes(data)
    assert store.get(key("k1")) is None
    assert not store.contains(key("k1"))
    assert number(store.get(key("k2"))) == 2
    assert (store.stats().quarantined, store.stats().misses) == (1, 1)
    assert [one.read_bytes() for one in (tmp_path / "damaged").iterdir()] == [bytes(data)]
    assert store.put(key("k1"), record(1))
    assert number(store.get(key("k1"))) == 1
    store.check_integrity()


def test_a_file_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    store = filled(tmp_path)
    path_of(store, "k1").unlink()
    assert store.get(key("k1")) is None
    assert not store.contains(key("k1"))
    assert store.stats().faults == 1


@pytest.mark.parametrize("left", ["nothing", "garbage", "half"])
def test_an_index_that_is_lost_is_built_from_the_files(tmp_path: Path, left: str) -> None:
    filled(tmp_path).close()
    index = tmp_path / "index.sqlite"
    data = index.read_bytes()
    for one in tmp_path.glob("index.sqlite*"):
        one.unlink()
    if left != "nothing":
        index.write_bytes(b"no database at all" * 100 if left == "garbage" else data[: len(data) // 2])
    again = opened(tmp_path)
    assert [number(again.get(key(f"k{at}"))) for at in range(5)] == [0, 1, 2, 3, 4]


def test_an_index_of_another_version_is_left_alone(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("PRAGMA user_version=99")
    index.close()
    with pytest.raises(ConfigError, match="another version"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        opened(tmp_path / "file")


def test_verify_names_every_damaged_file_and_keeps_the_rest(tmp_path: Path) -> None:
    store = filled(tmp_path, 6)
    paths = [path_of(store, f"k{at}") for at in range(6)]
    paths[0].write_bytes(paths[0].read_bytes()[:-1])
    shutil.copyfile(paths[2], paths[1])
    paths[3].unlink()
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("DELETE FROM records WHERE identity = 'k4'")
    index.close()
    (tmp_path / "writing" / "999999999-0-0").write_bytes(b"half")
    found = store.verify()
    assert set(found.damaged) == {paths[0], paths[1]}
    assert (found.missing, found.adopted) == ([key("k3")], [key("k4")])
    assert (found.good, found.unfinished) == (3, 1)
    assert sorted(entry.key.identity for entry in store.entries()) == ["k2", "k4", "k5"]
    store.check_integrity()
    again = store.verify()
    assert (again.good, again.damaged, again.missing, again.adopted) == (3, {}, [], [])


@pytest.mark.parametrize("fault", ["out of space", "partial write", "flush refused", "rename refused"])
def test_a_write_that_fails_costs_the_record_and_nothing_else(tmp_path: Path, fault: str) -> None:
    filled(tmp_path).close()
    medium = FaultyMedium()
    store = DiskStore(tmp_path, MB, medium=medium)
    medium.arm(fault)
    assert not store.put(key("new"), record(9))
    assert store.get(key("new")) is None
    assert list((tmp_path / "writing").iterdir()) == []
    assert (store.stats().refused, store.stats().faults) == (1, 1)
    assert number(store.get(key("k0"))) == 0
    store.check_integrity()
    assert store.put(key("new"), record(9))
    assert number(store.get(key("new"))) == 9


@pytest.mark.parametrize("fault", ["read refused", "read dropped"])
def test_a_read_that_fails_is_a_miss_once(tmp_path: Path, fault: str) -> None:
    filled(tmp_path).close()
    medium = FaultyMedium()
    store = DiskStore(tmp_path, MB, medium=medium)
    medium.arm(fault)
    assert store.get(key("k1")) is None
    assert number(store.get(key("k1"))) == 1
    assert (store.stats().misses, store.stats().faults, store.stats().quarantined) == (1, 1, 0)


@pytest.mark.parametrize("fault", ["read corrupted", "read cut short"])
def test_what_is_damaged_on_its_way_is_read_once_more(tmp_path: Path, fault: str) -> None:
    filled(tmp_path).close()
    medium = FaultyMedium(seed=3)
    store = DiskStore(tmp_path, MB, medium=medium)
    medium.arm(fault)
    assert number(store.get(key("k1"))) == 1
    assert (store.stats().hits, store.stats().faults, store.stats().quarantined) == (1, 1, 0)


def test_names_lead_nowhere_but_into_the_folder(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    for name in ("../../out", "/etc/passwd", "a/b", "..", "x" * 5000, "null\0byte", "ümlaut"):
        assert store.put(Key(name, "../kv"), record(3))
        assert number(store.get(Key(name, "../kv"))) == 3
    assert [one.name for one in tmp_path.iterdir()] == ["store"]
    store.check_integrity()


def test_two_stores_on_one_folder_see_each_others_records(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    for at in range(20):
        assert (one, other)[at % 2].put(key(f"k{at}"), record(at))
    for store in (one, other):
        assert [number(store.get(key(f"k{at}"))) for at in range(20)] == list(range(20))
        store.check_integrity()


def test_readers_and_an_evicting_writer_never_see_a_wrong_record(tmp_path: Path) -> None:
    reader, writer = opened(tmp_path, 10 * 4000), opened(tmp_path, 10 * 4000)
    wrong: list[object] = []
    over = threading.Event()

    def read_on() -> None:
        while not over.is_set():
            for at in range(30):
                found = number(reader.get(key(f"k{at}")))
                if found not in (None, at):
                    wrong.append(found)

    threads = [threading.Thread(target=read_on) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(90):
        assert writer.put(key(f"k{turn % 30}"), record(turn % 30))
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert reader.stats().quarantined == 0
    writer.check_integrity()


WRITES = """
import sys
from pathlib import Path
import torch
from looseleaf.kv.records import Features
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import FaultyMedium
from looseleaf.store.protocol import Key
store = DiskStore(Path(sys.argv[1]), 2**30)
print("open", flush=True)
at = int(sys.argv[2])
while True:
    record = Features(embeddings=torch.full((50_000,), at, dtype=torch.int32))
    if store.put(Key(f"k{at}", "features"), record):
        print(at, flush=True)
    at += 1
"""


def test_what_a_killed_writer_said_was_stored_is_there(tmp_path: Path) -> None:
    said: list[int] = []
    for turn in range(5):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path), str(turn * 10_000)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        time.sleep(0.05 + 0.03 * turn)
        child.send_signal(signal.SIGKILL)
        said += [int(line) for line in child.communicate()[0].splitlines() if line.strip()]
    store = opened(tmp_path, 2**30)
    assert said
    assert [number(store.get(key(f"k{at}"))) for at in said] == said
    assert list((tmp_path / "writing").iterdir()) == [], "what was half written is gone"
    assert store.verify().damaged == {}
