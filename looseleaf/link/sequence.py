"""A sequence being linked: its table, what was fetched for it, and its rows handed out as lanes.

The linker fills it with features, stored rows and states; `take` makes of the plan's rows a lane for a pass to compute,
with stored rows bound in front of each layer. It knows tensors and slots, not where they came from.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.pool import Seat, SlabPool
from looseleaf.kv.records import Features, Patch
from looseleaf.kv.table import SlotTable
from looseleaf.link.bind import binder
from looseleaf.link.bound import Bound
from looseleaf.link.oracle import most_deviating
from looseleaf.link.plan import Plan, Rows, flatten
from looseleaf.model.adapter import Adapter
from looseleaf.model.lane import Deep, Entry, Lane
from looseleaf.model.rotary import rotate, unrotate
from looseleaf.prompt.chunks import Prompt, Span


@dataclass(kw_only=True)
class Stages:
    """Seconds spent on the way to the first token, by stage."""

    prepare_s: float = 0.0
    queue_s: float = 0.0
    vision_s: float = 0.0
    chunks_s: float = 0.0
    link_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0


class Linked:
    """A sequence being linked: its table, and the rows still to be computed, handed out as lanes."""

    def __init__(self, adapter: Adapter, pool: SlabPool, prompt: Prompt, plan: Plan, *, capacity: int, home_pos: int):
        self.adapter = adapter
        self.prompt = prompt
        self.plan = plan
        self.home_pos = home_pos
        """Where chunks started when their rows were computed."""
        self._pool = pool
        self._seat: Seat | None = pool.take(capacity)
        self.table = SlotTable(self._seat.slab.rows(self._seat.number), self._seat)
        if plan.approximate:
            self.table.taint_from(plan.exact_tokens)
        self.positions = prompt.positions_to(capacity).to(adapter.device)
        self.features: dict[int, Features] = {}
        """By a chunk's place in the prompt: its visual rows, where some of its rows are computed."""
        self.sources: list[tuple[Span, KVRows]] = []
        """Reused chunks and their rows, keys un-rotated."""
        self.patches: dict[int, Patch] = {}
        """By a chunk's first slot: what context adds to its rows."""
        self.states: dict[int, list[tuple[Span, Tensor]]] = {}
        """By layer: boundary states [token, width] that chunks enter it with."""
        self.chosen: list[int] = []
        """Slots an oracle chose to be computed."""
        self.stages = Stages()
        self.done_to = 0
        """Slots before this one have been handed out, or need no computing."""
        self._bound = False

    @property
    def ready(self) -> bool:
        """Whether every row has been handed out."""
        return self.done_to >= len(self.prompt)

    def rows_left(self) -> int:
        """Rows of the widest layer that are still to be computed."""
        return max(sum(slot >= self.done_to for slot in flatten(rows.slots)) for rows in self.plan.rows)

    def take(self, budget: int) -> Lane:
        """The next rows as a lane: all of them when the plan cannot be split, else about `budget` in slot order."""
        stop = self._stop(budget)
        lane = self._lane(range(self.done_to, stop))
        if not self._bound and self.sources:  # the first pass binds everything that is stored
            lane.link = self._binder()
        self._bound = True
        self.done_to = stop
        return lane

    def unrotated(self, span: Span) -> KVRows:
        """A copy of a span's rows, its keys turned back."""
        rows, decoder = self.table.copy_out(range(span.start, span.stop)), self.adapter.decoder
        phase = decoder.phase(self.positions[:, span.start : span.stop])
        for keys in rows.keys:
            keys.copy_(unrotate(keys, phase, decoder.form))
        return rows

    def release(self) -> None:
        """Give the table's memory back; nothing may read this sequence any more."""
        if self._seat is not None:
            self._pool.give_back(self._seat)
            self._seat = None

    def _stop(self, budget: int) -> int:
        total = len(self.prompt)
        if not self.plan.splittable:
            return total
        end = total - 1 if self.plan.two_step and self.done_to < total - 1 else total
        widest = max((flatten(rows.slots) for rows in self.plan.rows), key=len)
        waiting = [slot for slot in widest if slot >= self.done_to]
        if len(waiting) > budget:
            end = min(end, waiting[max(1, budget)])
        return end

    def _binder(self) -> Callable[[int], None]:
        """A function that puts a layer's stored rows into the table."""
        spans = [span for span, _ in self.sources]
        places = [
            self.positions[:, span.start : span.stop] if self.plan.relocate
            else span.chunk.placement.positions.to(self.adapter.device) + self.home_pos  # type: ignore[union-attr]
            for span in spans
        ]  # fmt: skip
        phase = self.adapter.decoder.phase(torch.cat(places, dim=1))
        bound = [
            Bound(slots=slice(span.start, span.stop), rows=rows, patch=self.patches.get(span.start))
            for span, rows in self.sources
        ]
        put_in = binder(self.table.rows, bound, phase, self.adapter.decoder.form)

        def bind(layer: int) -> None:
            started = time.perf_counter()
            put_in(layer)
            self.stages.link_s += time.perf_counter() - started

        return bind

    def _lane(self, span: range) -> Lane:
        """The plan's rows with slots in `span`, layer by layer."""
        entries: dict[int, Entry] = {}
        stay: dict[int, Callable[[list[int]], list[int]]] = {}
        current: list[int] = []
        for rows in self.plan.rows:
            wanted = sorted({*(slot for slot in flatten(rows.slots) if slot in span), *self._chosen(rows)})
            if rows.layer == 0:
                entries[0] = Entry(slots=wanted, hidden=self.embed(wanted))
                current = wanted
                continue
            if rows.select is not None and rows.select.by == "deviation":
                stay[rows.layer] = self._deviation(rows, wanted)
                continue
            kept, held = set(wanted), set(current)
            stay[rows.layer] = lambda before, kept=kept: [slot for slot in before if slot in kept]  # type: ignore[misc]
            entering = [slot for slot in wanted if slot not in held]
            if entering:
                entries[rows.layer] = Entry(slots=entering, hidden=_states_of(self.states[rows.layer], entering))
            current = wanted
        return Lane(table=self.table, positions=self.positions, entries=entries, stay=stay, deep=self._deep())

    def embed(self, slots: Sequence[int]) -> Tensor:
        """Input embeddings [row, width] of ascending slots: text from the embedding, visual rows from features."""
        ids, marked = self.prompt.ids, torch.zeros(len(slots), dtype=torch.bool)
        visual: list[tuple[Tensor, Tensor]] = []
        for place, span in enumerate(self.prompt.chunks):
            first, last = bisect_left(slots, span.start), bisect_left(slots, span.stop)
            if first == last or place not in self.features or span.chunk is None:
                continue
            row_of = torch.full((len(span),), -1)
            row_of[torch.tensor(span.chunk.visual)] = torch.arange(len(span.chunk.visual))
            picked = row_of[torch.tensor(slots[first:last]) - span.start]
            rows = first + torch.nonzero(picked >= 0)[:, 0]
            marked[rows] = True
            visual.append((rows, self.features[place].embeddings[picked[picked >= 0].to(self.adapter.device)]))
        words = torch.tensor([ids[slot] for slot in slots], dtype=torch.long)
        words.masked_fill_(marked, 0)  # markers may have no embedding
        hidden = self.adapter.decoder.embed(words.to(self.adapter.device))
        for rows, features in visual:
            hidden[rows.to(hidden.device)] = features.to(hidden.dtype)
        return hidden

    def _deep(self) -> Deep | None:
        """Deepstack rows of all chunks whose features are at hand."""
        slots: list[int] = []
        features: list[Features] = []
        for place, span in enumerate(self.prompt.chunks):
            if place in self.features and self.features[place].deep and span.chunk is not None:
                slots += [span.start + offset for offset in span.chunk.visual]
                features.append(self.features[place])
        if not slots:
            return None
        return Deep(
            slots=slots, features=tuple(torch.cat(one) for one in zip(*(f.deep for f in features), strict=True))
        )

    def _chosen(self, rows: Rows) -> list[int]:
        return self.chosen if rows.select is not None and rows.select.by == "attention" else []

    def _deviation(self, rows: Rows, always: list[int]) -> Callable[[list[int]], list[int]]:
        assert rows.select is not None
        share, below = rows.select.share, rows.layer - 1

        def choose(before: list[int]) -> list[int]:
            chosen = most_deviating(self.table, self.open_sources(), below, share, self._turn())
            kept = {*always, *chosen}
            return [slot for slot in before if slot in kept]

        return choose

    def _turn(self) -> Callable[[Span, Tensor], Tensor]:
        decoder = self.adapter.decoder
        return lambda span, keys: rotate(keys, decoder.phase(self.positions[:, span.start : span.stop]), decoder.form)

    def open_sources(self) -> list[tuple[Span, KVRows]]:
        """Reused chunks that are not exact where they stand: the ones a selection chooses among."""
        inexact = {piece.start for piece in self.plan.pieces if piece.use == "reuse" and not piece.exact}
        return [(span, rows) for span, rows in self.sources if span.start in inexact]


def _states_of(states: Sequence[tuple[Span, Tensor]], slots: Sequence[int]) -> Tensor:
    """Boundary states [row, width] of ascending slots that lie in these spans."""
    parts = []
    for span, hidden in states:
        first, last = bisect_left(slots, span.start), bisect_left(slots, span.stop)
        parts.append(hidden[[slot - span.start for slot in slots[first:last]]])
    return torch.cat(parts)
