"""A folder of records: restarts, damage, crashes, several processes. Each costs a record at most, never a wrong one."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch

from looseleaf.errors import ConfigError
from looseleaf.kv.records import Features, Record
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import FaultyMedium, Medium
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
    return store.path(key(name))


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
    (tmp_path / "writing" / "999999999-abc-0").write_bytes(b"half")
    (tmp_path / "writing" / f"{os.getpid()}-another-0").write_bytes(b"of a process that had this number before")
    (tmp_path / "writing" / "99999999999999999999-abc-0").write_bytes(b"of nobody")
    found = store.verify()
    assert set(found.damaged) == {paths[0], paths[1]}
    assert (found.missing, found.adopted) == ([key("k3")], [key("k4")])
    assert (found.good, found.unfinished, found.unreadable) == (3, 2, {})
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


class Meanwhile(Medium):
    """Lets something happen just before a file is read."""

    def __init__(self, happens: Callable[[], object]) -> None:
        super().__init__(durable=False)
        self.happens, self.times = happens, 0

    def reading(self, path: Path) -> BinaryIO:
        file = super().reading(path)
        self.times += 1
        if self.times == 2:  # the second look at what seemed damaged
            self.happens()
        return file


def test_what_another_process_stored_meanwhile_is_not_put_aside(tmp_path: Path) -> None:
    other = filled(tmp_path)
    path_of(other, "k1").write_bytes(b"damaged")
    reader = DiskStore(tmp_path, MB, medium=Meanwhile(lambda: other.put(key("k1"), record(7))))
    assert reader.get(key("k1")) is None
    assert reader.stats().quarantined == 0
    assert number(other.get(key("k1"))) == number(reader.get(key("k1"))) == 7


def test_what_another_process_stored_meanwhile_does_not_expire(tmp_path: Path) -> None:
    now = [1000.0]
    one, other = (DiskStore(tmp_path, MB, clock=lambda: now[0]) for _ in range(2))
    one.put(key("a"), record(1), ttl_s=5)
    old = one._entry(key("a"))
    assert old is not None
    other.put(key("a"), record(2))
    now[0] += 10
    assert not one._remove(old)
    assert number(one.get(key("a"))) == 2


def test_an_index_whose_pages_are_damaged_is_built_anew(tmp_path: Path) -> None:
    filled(tmp_path, 60).close()
    index = tmp_path / "index.sqlite"
    data = bytearray(index.read_bytes())
    for at in range(4096, len(data), 4096):
        data[at : at + 64] = b"\xff" * 64
    index.write_bytes(data)
    again = opened(tmp_path)
    assert [number(again.get(key(f"k{at}"))) for at in range(60)] == list(range(60))
    again.check_integrity()


def test_an_index_that_goes_under_a_store_that_is_open_is_built_anew(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for one in tmp_path.glob("index.sqlite*"):
        one.unlink()
    assert number(store.get(key("k1"))) == 1
    assert store.put(key("new"), record(9))
    assert number(opened(tmp_path).get(key("new"))) == 9


def test_a_crash_while_the_index_is_built_leaves_it_to_be_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).close()
    for one in tmp_path.glob("index.sqlite*"):
        one.unlink()
    with monkeypatch.context() as broken:
        broken.setattr(DiskStore, "_look", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path)
    assert number(opened(tmp_path).get(key("k3"))) == 3


def test_a_locked_index_costs_a_miss_and_no_waiting_for_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looseleaf.store.index.WAIT_S", 0.1)
    store = filled(tmp_path)
    store.put(key("short"), record(1), ttl_s=-0.0)
    path_of(store, "k1").write_bytes(b"damaged")
    other = sqlite3.connect(tmp_path / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert store.get(key("short")) is None
    assert store.get(key("k1")) is None
    assert not store.put(key("new"), record(9))
    assert not store.delete(key("k2"))
    assert number(store.get(key("k2"))) == 2
    assert store.stats().faults >= 3
    other.execute("ROLLBACK")
    other.close()
    assert store.put(key("new"), record(9))


def test_files_the_medium_does_not_give_now_stay_where_they_are(tmp_path: Path) -> None:
    filled(tmp_path).close()
    medium = FaultyMedium()
    store = DiskStore(tmp_path, MB, medium=medium)
    medium.arm("read refused")
    found = store.verify()
    assert (found.good, len(found.unreadable), found.damaged) == (4, 1, {})
    assert store.verify().good == 5


def test_a_file_that_was_left_without_an_entry_is_entered_or_goes(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with sqlite3.connect(tmp_path / "index.sqlite") as index:
        index.execute("DELETE FROM records WHERE identity IN ('k0', 'k1')")
    index.close()
    store = DiskStore(tmp_path, 4 * 4000)
    store.collect()
    assert len(list((tmp_path / "records").glob("*/*"))) == len(store.entries()) == 4


def test_files_put_aside_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("looseleaf.store.disk.MOST_DAMAGED", 3)
    store = filled(tmp_path)
    for at in range(5):
        path_of(store, f"k{at}").write_bytes(b"damaged")
        assert store.get(key(f"k{at}")) is None
    assert len(list((tmp_path / "damaged").iterdir())) == 3
    store.collect()
    assert list((tmp_path / "damaged").iterdir()) == []


def test_a_clock_that_is_set_back_makes_nothing_live_longer(tmp_path: Path) -> None:
    now = [10_000.0]
    store = DiskStore(tmp_path, MB, clock=lambda: now[0])
    store.put(key("a"), record(1), ttl_s=60)
    now[0] -= 9_000
    found = store.fetch(key("a"))
    assert found is not None
    assert found[1] == 60


def test_a_forked_process_opens_the_index_for_itself(tmp_path: Path) -> None:
    store = filled(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0 if number(store.get(key("k1"))) == 1 and store.put(key("child"), record(5)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert number(store.get(key("child"))) == 5


WRITES = """
import sys
from pathlib import Path
import torch
from looseleaf.kv.records import Features
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import FaultyMedium, Medium
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
