"""Memory in front of a folder, and a whole system on it: a restarted process reads what another computed."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from PIL import Image as PILImages

from looseleaf import Config, Looseleaf
from looseleaf.errors import ConfigError
from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.kv.records import Features, Record, SequenceKV
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import Medium, RatedMedium
from looseleaf.store.memory import MemoryStore
from looseleaf.store.opening import folder_of, open_store
from looseleaf.store.protocol import Key
from looseleaf.store.tiered import TieredStore


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def key(name: str, part: str = "features") -> Key:
    return Key(name, part)


def record(number: int, size: int = 10) -> Features:
    return Features(embeddings=torch.full((size,), number, dtype=torch.uint8))


def number(found: Record | None) -> int | None:
    return int(found.embeddings[0]) if isinstance(found, Features) else None


def tiered(folder: Path, memory: int = 100, disk: int = 1000, clock: Clock | None = None) -> TieredStore:
    at = clock or Clock()
    below = DiskStore(folder, disk, clock=at, medium=Medium(durable=False))
    return TieredStore(MemoryStore(memory, clock=at), below, clock=at)


def test_what_memory_evicts_is_found_in_the_folder_and_comes_back(tmp_path: Path) -> None:
    store = tiered(tmp_path)
    for at in range(20):
        assert store.put(key(f"k{at}"), record(at))
    store.flush()
    assert store.memory.stats().records == 10
    assert number(store.get(key("k0"))) == 0
    assert store.memory.contains(key("k0"))
    assert (store.stats().disk_hits, store.stats().hits, store.stats().disk_records) == (1, 1, 20)
    assert store.get(key("none")) is None
    assert store.stats().misses == 1
    store.check_integrity()


def test_what_waits_to_be_written_is_found_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tiered(tmp_path, memory=0)
    go, put = threading.Event(), store.disk.put

    def slow(*given: object, **more: object) -> bool:
        go.wait()
        return put(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(store.disk, "put", slow)
    assert store.put(key("a"), record(1))
    assert store.put(key("b"), record(2))
    assert store.put(key("b"), record(3)), "the newer one counts"
    assert store.contains(key("a"))
    assert [number(store.get(key(name))) for name in "ab"] == [1, 3]
    go.set()
    store.flush()
    assert [number(store.disk.get(key(name))) for name in "ab"] == [1, 3]


def test_deleting_removes_it_everywhere(tmp_path: Path) -> None:
    store = tiered(tmp_path)
    for at in range(5):
        store.put(key(f"k{at}"), record(at))
        if at % 2:
            store.flush()
        assert store.delete(key(f"k{at}"))
        assert not store.delete(key(f"k{at}"))
        assert store.get(key(f"k{at}")) is None
    store.flush()
    assert list(store.disk.entries()) == []
    assert list((tmp_path / "records").glob("*/*")) == []


def test_a_time_to_live_goes_on_in_the_folder(tmp_path: Path) -> None:
    clock = Clock()
    store = tiered(tmp_path, clock=clock)
    store.put(key("a"), record(1), ttl_s=5.0)
    store.flush()
    store.memory.close()
    clock.now += 3
    assert number(store.get(key("a"))) == 1
    clock.now += 2
    assert store.get(key("a")) is None
    store.put(key("b"), record(1), ttl_s=0)
    assert store.get(key("b")) is None


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    store = tiered(tmp_path)
    for at in range(30):
        store.put(key(f"k{at}"), record(at))
    store.close()
    store.close()
    assert tiered(tmp_path).disk.stats().records == 30
    assert store.get(key("k1")) is None
    assert not store.put(key("k1"), record(1, 101)), "nobody would write it"


def test_what_is_wanted_soon_comes_ahead_and_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tiered(tmp_path)
    for at in range(4):
        store.put(key(f"k{at}"), record(at))
    store.flush()
    store.memory.close()
    go, fetched, fetch = threading.Event(), [], store.disk.fetch

    def slow(wanted: Key) -> object:
        go.wait()
        fetched.append(wanted.identity)
        return fetch(wanted)

    monkeypatch.setattr(store.disk, "fetch", slow)
    store.prefetch([key("k0"), key("k1"), key("none"), key("k0")])
    store.prefetch([key("k1")])
    threading.Timer(0.05, go.set).start()
    assert number(store.get(key("k1"))) == 1, "it waits for the read that is under way"
    assert number(store.get(key("k0"))) == 0
    assert fetched == ["k0", "k1"]
    assert store.get(key("none")) is None
    assert (store.stats().hits, store.stats().disk_hits, store.stats().misses) == (2, 2, 1)


def test_what_is_used_in_memory_stays_in_the_folder(tmp_path: Path) -> None:
    store = tiered(tmp_path, memory=1000, disk=100)
    for at in range(30):
        store.put(key(f"k{at}"), record(at))
        store.flush()
        assert number(store.get(key("k0"))) == 0
    assert store.disk.contains(key("k0"))
    assert not store.disk.contains(key("k1"))


def test_an_older_record_is_never_taken_for_a_newer_one(tmp_path: Path) -> None:
    store = tiered(tmp_path, memory=100, disk=200)
    for size, ttl_s, found in ((10, 0, None), (150, None, 2), (250, None, 1)):
        store.put(key("a"), record(1))
        store.flush()
        assert store.put(key("a"), record(2, size), ttl_s=ttl_s) == (size != 250), "refused, so the older one stays"
        for _ in range(2):
            assert number(store.get(key("a"))) == found
            store.flush()
        store.delete(key("a"))


def test_a_record_that_was_deleted_while_it_was_read_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tiered(tmp_path)
    store.put(key("a"), record(1))
    store.flush()
    store.memory.close()
    fetch = store.disk.fetch

    def slow(wanted: Key) -> object:
        found = fetch(wanted)
        assert store.delete(key("a"))
        return found

    monkeypatch.setattr(store.disk, "fetch", slow)
    store.get(key("a"))
    monkeypatch.undo()
    assert store.get(key("a")) is None


def test_closing_does_not_wait_for_what_is_wanted(tmp_path: Path) -> None:
    filled = tiered(tmp_path)
    for at in range(5):
        filled.put(key(f"k{at}"), record(at))
    filled.close()
    below = DiskStore(tmp_path, 1000, clock=Clock(), medium=RatedMedium(100))  # a tenth of a second each
    store = TieredStore(MemoryStore(100), below)
    store.prefetch(key(f"k{at}") for at in range(5))
    started = time.perf_counter()
    store.close()
    assert time.perf_counter() - started < 0.4
    store.prefetch([key("k0")])


def test_a_medium_that_breaks_in_unknown_ways_does_not_end_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = tiered(tmp_path)

    def broken(*_: object, **__: object) -> bool:
        raise RuntimeError("who knows")

    monkeypatch.setattr(store.disk, "put", broken)
    assert store.put(key("a"), record(1))
    store.flush()
    assert number(store.get(key("a"))) == 1
    monkeypatch.undo()
    assert store.put(key("b"), record(2))
    store.flush()
    assert number(store.disk.get(key("b"))) == 2
    assert "could not be stored" in caplog.text


def test_blocks_of_a_prefix_stay_in_memory(tmp_path: Path) -> None:
    plane = Plane(heads=1, dim=2)
    rows = KVRows(KVLayout(layers=(LayerLayout(keys=plane, values=plane),), dtype=torch.float32), 2)
    store = tiered(tmp_path)
    assert store.put(key("s", "sequence"), SequenceKV(rows=rows))
    store.flush()
    assert store.contains(key("s", "sequence"))
    assert not store.disk.contains(key("s", "sequence"))


def test_an_address_opens_a_store(tmp_path: Path) -> None:
    assert isinstance(open_store("memory://", memory_bytes=1, disk_bytes=1), MemoryStore)
    for address in (str(tmp_path / "a b"), f"file://{tmp_path}/a%20b"):
        assert folder_of(address) == tmp_path / "a b"
    store = open_store(str(tmp_path / "a b"), memory_bytes=1, disk_bytes=1)
    assert isinstance(store, TieredStore)
    store.close()
    for address in ("", "ftp://x/y", "file://host/path", "~nosuchuser/x", "a\0b", "memory:", "memory:/"):
        with pytest.raises(ConfigError, match="store"):
            open_store(address, memory_bytes=1, disk_bytes=1)
        with pytest.raises(ConfigError, match="store"):
            Config(store=address)
    assert folder_of("file:///tmp/a#b?c") == Path("/tmp/a#b?c")
    with pytest.raises(ConfigError, match="store is 'memory://'"):
        Config(store=3)  # type: ignore[arg-type]


ASKS = """
import json, sys
from PIL import Image
from looseleaf import Config, Looseleaf
image = Image.effect_noise((84, 84), 90).convert("RGB") if sys.argv[2] == "draw" else Image.open(sys.argv[2])
image.save(sys.argv[3])
with Looseleaf.open("tiny:" + sys.argv[4], dtype="float32", config=Config(store=sys.argv[1])) as ll:
    looked = ll.linker.counters
    found = []
    for policy in ("full-reuse", "patched:0.5"):
        answer = ll.ask(["See", image, "and", image, "What?"], policy=policy, max_tokens=4)
        ll.settle()
        found.append([answer.token_ids, answer.usage.relocated_tokens, answer.usage.patched_tokens])
    print(json.dumps({"found": found, "computed": looked.chunks_computed, "seen": looked.vision_calls}))
"""


def run(folder: Path, source: str, image: Path, family: str) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASKS, str(folder), source, str(image), family],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_a_restarted_process_reads_what_was_computed_before(tmp_path: Path, family: str) -> None:
    image = tmp_path / "image.png"
    first = run(tmp_path / "store", "draw", image, family)
    again = run(tmp_path / "store", str(image), image, family)
    assert first["computed"]
    assert (again["computed"], again["seen"]) == (0, 0)
    reused, patched = again["found"]  # type: ignore[misc]
    assert reused[0] == first["found"][0][0]  # type: ignore[index]
    assert reused[1] > 0
    assert patched[2] > 0, "the patch was left by the first process"


def test_a_damaged_folder_costs_time_and_no_answer(tmp_path: Path) -> None:
    prompt = ["See", PILImages.effect_noise((84, 84), 90).convert("RGB"), "What?"]
    config = Config(store=str(tmp_path))
    with Looseleaf.open("tiny:qwen2_5_vl", dtype="float32", config=config) as ll:
        expected = ll.ask(prompt, policy="full-reuse", max_tokens=4).token_ids
    for path in (tmp_path / "records").glob("*/*"):
        data = bytearray(path.read_bytes())
        data[-3] ^= 16
        path.write_bytes(data)
    with Looseleaf.open("tiny:qwen2_5_vl", dtype="float32", config=config) as ll:
        assert ll.ask(prompt, policy="full-reuse", max_tokens=4).token_ids == expected
        assert ll.stats().quarantined >= 1
        assert ll.linker.counters.chunks_computed == 1
