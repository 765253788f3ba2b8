"""Who runs in the next pass. Pure: sizes in, a schedule out.

Decoding comes first, one row a sequence, so that running answers keep their pace. What is left of the row budget goes
to prompts, oldest first, in pieces. New requests are admitted while their KV fits the byte budget and each sequence of
the batch can have a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.checks import check_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Budgets of the engine."""

    max_rows: int = 2048
    """Rows one pass computes at most, unless a policy must see all rows of a prompt at once."""
    max_running: int = 64
    max_waiting: int = 256
    kv_budget_bytes: int = 8 * 2**30
    """Bytes of all running sequences' tables together."""

    def __post_init__(self) -> None:
        for name in ("max_rows", "max_running", "max_waiting", "kv_budget_bytes"):
            check_whole(f"engine.{name}", getattr(self, name), low=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A sequence in the batch: `rows_left` of its prompt are not computed yet; 0 means it decodes."""

    id: int
    rows_left: int
    splittable: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The next pass: sequences that decode a token, and prompts with the rows each may compute."""

    decode: tuple[int, ...]
    prefill: tuple[tuple[int, int], ...]


def admit(waiting_bytes: Sequence[int], running: int, used_bytes: int, config: EngineConfig) -> int:
    """How many of the waiting requests, oldest first, may join now. None overtakes an older one."""
    count = 0
    for size in waiting_bytes:
        if running + count >= min(config.max_running, config.max_rows) or used_bytes + size > config.kv_budget_bytes:
            break
        used_bytes += size
        count += 1
    return count


def schedule(running: Sequence[Running], config: EngineConfig) -> Schedule:
    """Decode first, then prompts in order of arrival within the row budget."""
    room = config.max_rows - any(one.rows_left for one in running)  # a row is kept for prompts
    decode = tuple(one.id for one in running if one.rows_left == 0)[:room]
    budget = config.max_rows - len(decode)
    prefill: list[tuple[int, int]] = []
    for one in running:
        if one.rows_left == 0:
            continue
        if budget <= 0:
            break
        if not one.splittable and one.rows_left > budget:
            if not prefill:
                prefill.append((one.id, one.rows_left))
            break
        rows = min(one.rows_left, budget)
        prefill.append((one.id, rows))
        budget -= rows
    return Schedule(decode=decode, prefill=tuple(prefill))
