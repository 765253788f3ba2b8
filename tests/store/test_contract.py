"""What every store promises, run on each of them; the last tests are the memory store's own.

To add a store, add a function to STORES that opens one with a budget and a clock.
"""

import atexit
import inspect
import random
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.errors import ConfigError
from looseleaf.kv.records import Features, Record, States
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import Medium
from looseleaf.store.memory import MemoryStore
from looseleaf.store.protocol import Key, Store, StoreStats
from looseleaf.store.tiered import TieredStore

Opener = Callable[[int, Callable[[], float]], Store]


def on_disk(budget_bytes: int, clock: Callable[[], float]) -> Store:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return DiskStore(Path(folder), budget_bytes, clock=clock, medium=Medium(durable=False))


class Flushed(TieredStore):
    """Everything in the folder at once, and figures as those of one store: both hold the same then."""

    def put(self, key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        said = super().put(key, record, ttl_s=ttl_s)
        self.flush()
        return said

    def stats(self) -> StoreStats:
        return replace(super().stats(), disk_records=0, disk_bytes=0, disk_hits=0)


def tiered(budget_bytes: int, clock: Callable[[], float]) -> Store:
    below = on_disk(budget_bytes, clock)
    assert isinstance(below, DiskStore)
    return Flushed(MemoryStore(budget_bytes, clock=clock), below, clock=clock)


STORES: dict[str, Opener] = {
    "memory": lambda budget_bytes, clock: MemoryStore(budget_bytes, clock=clock),
    "disk": on_disk,
    "tiered": tiered,
}


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=STORES)
def opener(request: pytest.FixtureRequest) -> Opener:
    return STORES[request.param]


@pytest.fixture
def store(opener: Opener, clock: Clock) -> Store:
    """A store of 100 bytes."""
    return opener(100, clock)


def key(name: str, part: str = "features") -> Key:
    return Key(name, part)


def record(size_bytes: int, tag: int = 0) -> Features:
    """A record of exactly this size that says which one it is."""
    return Features(embeddings=torch.full((size_bytes,), tag, dtype=torch.uint8))


def tag(found: Record | None) -> int | None:
    if found is None:
        return None
    assert isinstance(found, Features)
    return int(found.embeddings[0])


def held(store: Store, *names: str) -> list[str]:
    return [name for name in names if store.contains(key(name))]


def test_what_was_put_comes_back_and_nothing_else_does(store: Store) -> None:
    assert store.get(key("a")) is None
    assert store.put(key("a"), record(10, 1))
    assert store.put(key("b"), record(10, 2))
    assert tag(store.get(key("a"))) == 1
    assert tag(store.get(key("b"))) == 2
    assert store.get(key("c")) is None


def test_parts_of_one_identity_are_kept_apart(store: Store) -> None:
    store.put(key("a", "features"), record(10, 1))
    store.put(key("a", "kv"), record(10, 2))
    assert tag(store.get(key("a", "features"))) == 1
    assert tag(store.get(key("a", "kv"))) == 2
    assert store.get(key("a", "states@3")) is None
    assert store.delete(key("a", "kv"))
    assert tag(store.get(key("a", "features"))) == 1


def test_every_kind_of_record_keeps_its_facts(store: Store) -> None:
    store.put(key("a", "states@7"), States(layer=7, hidden=torch.arange(4.0).view(2, 2)))
    found = store.get(key("a", "states@7"))
    assert isinstance(found, States)
    assert found.layer == 7
    assert torch.equal(found.hidden, torch.arange(4.0).view(2, 2))
    store.put(key("b"), Features(embeddings=torch.ones(1, 2), deep=(torch.zeros(1, 2), torch.ones(1, 2))))
    deep = store.get(key("b"))
    assert isinstance(deep, Features)
    assert [one.sum().item() for one in deep.deep] == [0, 2]


def test_the_least_recently_used_record_leaves_first(store: Store) -> None:
    for name in "abcd":
        store.put(key(name), record(25))
    store.put(key("e"), record(25))
    assert held(store, *"abcde") == ["b", "c", "d", "e"]
    store.put(key("f"), record(50))
    assert held(store, *"bcdef") == ["d", "e", "f"]
    assert store.stats().evictions == 3


def test_reading_makes_a_record_recent(store: Store) -> None:
    for name in "abcd":
        store.put(key(name), record(25))
    store.get(key("a"))
    store.put(key("e"), record(25))
    assert held(store, *"abcde") == ["a", "c", "d", "e"]


def test_asking_whether_it_is_there_touches_and_counts_nothing(store: Store) -> None:
    for name in "abcd":
        store.put(key(name), record(25))
    before = store.stats()
    assert store.contains(key("a"))
    assert not store.contains(key("z"))
    assert store.stats() == before
    store.put(key("e"), record(25))
    assert held(store, *"abcde") == ["b", "c", "d", "e"]


def test_a_miss_does_not_disturb_what_is_held(store: Store) -> None:
    store.put(key("a"), record(60))
    assert store.get(key("b")) is None
    assert not store.delete(key("b"))
    assert store.stats().size_bytes == 60


def test_a_record_may_fill_the_budget_exactly_and_one_byte_more_is_refused(store: Store) -> None:
    assert store.put(key("a"), record(100, 1))
    assert store.stats().size_bytes == 100
    assert not store.put(key("b"), record(101, 2))
    assert store.get(key("b")) is None
    assert tag(store.get(key("a"))) == 1, "a record that cannot be kept must not cost those that are"
    assert (store.stats().refused, store.stats().evictions) == (1, 0)


def test_a_store_without_budget_refuses_everything_and_still_answers(opener: Opener, clock: Clock) -> None:
    store = opener(0, clock)
    assert not store.put(key("a"), record(1))
    assert store.get(key("a")) is None
    assert store.stats() == StoreStats(misses=1, refused=1)
    store.check_integrity()


def test_a_negative_budget_is_an_error(opener: Opener, clock: Clock) -> None:
    with pytest.raises(ConfigError, match="budget_bytes must be >= 0"):
        opener(-1, clock)


def test_the_last_record_put_under_a_key_wins_and_its_bytes_count_once(store: Store) -> None:
    store.put(key("a"), record(40, 1))
    store.put(key("b"), record(40, 2))
    for size_bytes, mark in ((60, 3), (10, 4), (10, 5)):
        assert store.put(key("a"), record(size_bytes, mark))
        assert tag(store.get(key("a"))) == mark
        store.check_integrity()
    assert held(store, "a", "b") == ["a", "b"]
    assert (store.stats().size_bytes, store.stats().evictions) == (50, 0)


def test_a_replacement_that_needs_room_takes_its_own_first(store: Store) -> None:
    store.put(key("a"), record(50, 1))
    store.put(key("b"), record(50, 2))
    assert store.put(key("a"), record(50, 3))
    assert held(store, "a", "b") == ["a", "b"]
    assert store.put(key("a"), record(90, 4))
    assert held(store, "a", "b") == ["a"]


def test_replacing_makes_a_record_recent(store: Store) -> None:
    for name in "abcd":
        store.put(key(name), record(25))
    store.put(key("a"), record(25))
    store.put(key("e"), record(25))
    assert held(store, *"abcde") == ["a", "c", "d", "e"]


def test_a_record_expires_at_its_time_and_not_before(store: Store, clock: Clock) -> None:
    store.put(key("a"), record(10), ttl_s=5.0)
    store.put(key("b"), record(10))
    clock.now += 4.999
    assert held(store, "a", "b") == ["a", "b"]
    assert store.get(key("a")) is not None, "reading does not prolong"
    clock.now += 0.001
    assert held(store, "a", "b") == ["b"]
    assert store.get(key("a")) is None
    clock.now += 10**9
    assert store.get(key("b")) is not None
    assert store.stats().expired == 1
    assert store.stats().size_bytes == 10


def test_expiry_counts_as_a_miss(store: Store, clock: Clock) -> None:
    store.put(key("a"), record(10), ttl_s=1.0)
    clock.now += 1
    assert store.get(key("a")) is None
    assert (store.stats().hits, store.stats().misses, store.stats().records) == (0, 1, 0)


@pytest.mark.parametrize("ttl_s", [0, 0.0])
def test_no_time_to_live_means_never_found(store: Store, ttl_s: float) -> None:
    store.put(key("a"), record(10), ttl_s=ttl_s)
    assert store.get(key("a")) is None


def test_a_new_record_has_its_own_time_to_live(store: Store, clock: Clock) -> None:
    store.put(key("a"), record(10, 1), ttl_s=1.0)
    store.put(key("a"), record(10, 2))
    store.put(key("b"), record(10, 1))
    store.put(key("b"), record(10, 2), ttl_s=1.0)
    clock.now += 2
    assert tag(store.get(key("a"))) == 2
    assert store.get(key("b")) is None


def test_expired_records_make_room_before_live_ones_do(store: Store, clock: Clock) -> None:
    store.put(key("live"), record(40))
    store.put(key("dead"), record(60), ttl_s=1.0)
    clock.now += 2
    store.put(key("new"), record(60))
    assert held(store, "live", "dead", "new") == ["live", "new"]
    assert store.stats().evictions == 0


def test_asking_for_an_expired_record_counts_nothing_either(store: Store, clock: Clock) -> None:
    store.put(key("a"), record(10), ttl_s=1.0)
    clock.now += 2
    before = store.stats()
    assert not store.contains(key("a"))
    assert store.stats() == before


def test_an_expired_record_is_not_there_to_be_deleted(store: Store, clock: Clock) -> None:
    store.put(key("a"), record(10), ttl_s=1.0)
    clock.now += 2
    assert not store.delete(key("a"))


def test_a_time_to_live_that_is_no_number_is_an_error(store: Store) -> None:
    with pytest.raises(ConfigError, match="ttl_s"):
        store.put(key("a"), record(10), ttl_s=float("nan"))


def test_deleting_says_whether_there_was_one_and_frees_its_bytes(store: Store) -> None:
    store.put(key("a"), record(60))
    assert store.delete(key("a"))
    assert not store.delete(key("a"))
    assert store.get(key("a")) is None
    assert (store.stats().size_bytes, store.stats().records, store.stats().evictions) == (0, 0, 0)
    assert store.put(key("b"), record(100))


def test_stats_tell_what_happened(store: Store) -> None:
    store.put(key("a"), record(60))
    store.put(key("b"), record(60))
    store.put(key("c"), record(1000))
    for name in "abbc":
        store.get(key(name))
    assert store.stats() == StoreStats(
        records=1, size_bytes=60, budget_bytes=100, hits=2, misses=2, evictions=1, expired=0, refused=1
    )


def test_an_empty_record_takes_no_room(store: Store) -> None:
    store.put(key("full"), record(100))
    assert store.put(key("empty"), record(0))
    assert held(store, "full", "empty") == ["full", "empty"]


def test_a_closed_store_holds_nothing(store: Store) -> None:
    store.put(key("a"), record(60))
    store.close()
    store.close()
    assert (store.stats().records, store.stats().size_bytes) == (0, 0)
    store.check_integrity()


def test_many_threads_never_get_another_ones_record(opener: Opener, clock: Clock) -> None:
    store = opener(400, clock)
    start = threading.Barrier(8)

    def work(seed: int) -> int:
        chance = random.Random(seed)
        start.wait()
        wrong = 0
        for _ in range(400):
            number = chance.randrange(12)
            name = key(f"key {number}")
            act = chance.random()
            if act < 0.4:
                store.put(name, record(chance.randrange(1, 90), number), ttl_s=chance.choice([None, 0.5]))
            elif act < 0.8:
                wrong += tag(store.get(name)) not in (None, number)
            elif act < 0.9:
                store.delete(name)
            else:
                clock.now += 0.5
                wrong += store.stats().size_bytes > 400
        return wrong

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(work, range(8))) == 0
    store.check_integrity()
    stats = store.stats()
    assert stats.hits
    assert stats.misses
    assert stats.evictions
    assert stats.expired


NAMES = st.sampled_from("abcdef")
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), NAMES, st.integers(0, 60)),
        st.tuples(st.just("get"), NAMES),
        st.tuples(st.just("contains"), NAMES),
        st.tuples(st.just("delete"), NAMES),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", STORES)
@settings(max_examples=100, deadline=None)
@given(acts=ACTS, budget_bytes=st.integers(0, 100))
def test_it_behaves_like_an_ordered_list_with_a_budget(name: str, acts: list[tuple], budget_bytes: int) -> None:  # type: ignore[type-arg]
    store = STORES[name](budget_bytes, Clock())
    model: OrderedDict[str, tuple[int, int]] = OrderedDict()
    hits = misses = evictions = refused = 0
    for number, (act, where, *more) in enumerate(acts):
        if act == "put":
            (size,) = more
            fits = size <= budget_bytes
            assert store.put(key(where), record(size, number)) == fits
            refused += not fits
            if fits:
                model.pop(where, None)
                while sum(one for one, _ in model.values()) + size > budget_bytes:
                    model.popitem(last=False)
                    evictions += 1
                model[where] = (size, number)
        elif act == "get":
            found = store.get(key(where))
            assert (found is None) == (where not in model)
            if found is None:
                misses += 1
            else:
                hits += 1
                model.move_to_end(where)
                size, put_at = model[where]
                assert found.nbytes == size
                assert size == 0 or tag(found) == put_at
        elif act == "contains":
            assert store.contains(key(where)) == (where in model)
        else:
            assert store.delete(key(where)) == (model.pop(where, None) is not None)
        store.check_integrity()
    assert store.stats() == StoreStats(
        records=len(model), size_bytes=sum(size for size, _ in model.values()), budget_bytes=budget_bytes,
        hits=hits, misses=misses, evictions=evictions, refused=refused,
    )  # fmt: skip
    store.close()


TIMED = st.lists(st.tuples(NAMES, st.one_of(st.none(), st.integers(0, 4)), st.integers(0, 3)), min_size=1, max_size=25)


@pytest.mark.parametrize("name", STORES)
@settings(max_examples=60, deadline=None)
@given(acts=TIMED)
def test_a_record_is_found_exactly_until_its_time_is_over(name: str, acts: list[tuple[str, int | None, int]]) -> None:
    clock = Clock()
    store = STORES[name](10_000, clock)
    until: dict[str, tuple[float, int]] = {}
    for number, (where, ttl_s, passes) in enumerate(acts):
        store.put(key(where), record(3, number), ttl_s=ttl_s)
        until[where] = (float("inf") if ttl_s is None else clock.now + ttl_s, number)
        clock.now += passes
        for other, (end, put_at) in until.items():
            assert tag(store.get(key(other))) == (put_at if clock.now < end else None)
        store.check_integrity()


@pytest.mark.parametrize("name", STORES)
def test_it_has_the_protocols_methods_with_the_protocols_arguments(name: str) -> None:
    store = STORES[name](0, Clock())
    for method, declared in inspect.getmembers(Store, inspect.isfunction):
        if not method.startswith("_"):
            expected = list(inspect.signature(declared).parameters.values())[1:]
            got = list(inspect.signature(getattr(store, method)).parameters.values())
            assert [(one.name, one.kind) for one in got[: len(expected)]] == [(o.name, o.kind) for o in expected]


def test_the_memory_store_copies_nothing() -> None:
    store = MemoryStore(100)
    one = record(10)
    store.put(key("a"), one)
    assert store.get(key("a")) is one


@pytest.mark.parametrize("damage", ["_size_bytes", "budget_bytes"])
def test_the_memory_stores_integrity_check_catches_wrong_books(damage: str) -> None:
    store = MemoryStore(100)
    store.put(key("a"), record(10))
    store.check_integrity()
    setattr(store, damage, 9)
    with pytest.raises(AssertionError):
        store.check_integrity()
