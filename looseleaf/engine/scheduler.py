"""Who runs in the next pass. Pure: sizes in, a schedule out.

Decoding comes first, one row a sequence, so that running answers keep their pace. What is left of the row budget goes
to prompts, oldest first, in pieces. New requests are admitted while their KV fits the byte budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from looseleaf.errors import ConfigError


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
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be >= 1, got {getattr(self, name)}")


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
        if running + count >= config.max_running or used_bytes + size > config.kv_budget_bytes:
            break
        used_bytes += size
        count += 1
    return count


def schedule(running: Sequence[Running], config: EngineConfig) -> Schedule:
    """Decode first, then prompts in order of arrival within the row budget."""
    decode = tuple(one.id for one in running if one.rows_left == 0)
    budget = config.max_rows - len(decode)
    prefill: list[tuple[int, int]] = []
    for one in running:
        if one.rows_left == 0:
            continue
        if budget <= 0 and prefill:
            break
        if not one.splittable and one.rows_left > budget:
            if not prefill:
                prefill.append((one.id, one.rows_left))
            break
        rows = min(one.rows_left, max(1, budget))
        prefill.append((one.id, rows))
        budget -= rows
    return Schedule(decode=decode, prefill=tuple(prefill))
