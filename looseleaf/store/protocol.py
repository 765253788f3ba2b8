"""What a store is: records under content keys, within a byte budget.

A store answers with the record that was put under this very key, or with None; it never answers with another. It knows
nothing of prompts or policies and may drop a record at any time: what is missing is computed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from looseleaf.kv.records import Record


class Key(NamedTuple):
    """A record's identity (a full digest) and which part of it: kv, features, states@LAYER, sequence, patch, close."""

    identity: str
    part: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreStats:
    """Counters since the store was opened, and what it holds now."""

    records: int = 0
    size_bytes: int = 0
    budget_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    expired: int = 0
    refused: int = 0
    """Records larger than the whole budget, or that could not be written: computed, used, not kept."""
    quarantined: int = 0
    """Stored files that were damaged or another's: put aside, computed again."""
    faults: int = 0
    """Times the medium failed and the answer was computed instead."""
    disk_records: int = 0
    disk_bytes: int = 0
    disk_hits: int = 0
    """Of a folder behind memory; hits are counted among the hits."""


class Store(Protocol):
    """Any medium. All methods may be called from several threads."""

    def get(self, key: Key) -> Record | None:
        """The record under this key, now the most recently used; None when absent or expired."""

    def prefetch(self, keys: Iterable[Key]) -> None:
        """These will be wanted soon: a store that is slow to answer may begin. Returns at once."""

    def put(self, key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        """Keep a record, evicting the least recently used; False when it does not fit at all."""

    def contains(self, key: Key) -> bool:
        """Whether `get` would answer, without counting or touching anything."""

    def delete(self, key: Key) -> bool:
        """Forget a record; whether there was one."""

    def flush(self) -> None:
        """Wait until everything stored so far is where it stays."""

    def stats(self) -> StoreStats:
        """Counters and sizes."""

    def check_integrity(self) -> None:
        """Raise AssertionError when the books do not agree with the records."""

    def close(self) -> None:
        """Let go of everything."""
