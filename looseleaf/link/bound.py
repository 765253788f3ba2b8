"""Rows of a chunk on their way into a table: what both ways of binding take."""

from __future__ import annotations

from dataclasses import dataclass

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Patch


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Rows of a chunk and where they go."""

    slots: slice
    rows: KVRows
    """Keys un-rotated."""
    patch: Patch | None
