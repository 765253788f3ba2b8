"""The linker: makes a sequence's KV from a plan.

Fetches stored parts, computes what is missing (vision, then chunks alone in the canonical context), and hands out
lanes: the rows a pass computes, with stored rows bound in front of each layer. It decides nothing; what the plan says
and the store no longer has is computed and counted.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.kv.pool import Seat, SlabPool
from looseleaf.kv.records import ChunkKV, Features, SequenceKV, States
from looseleaf.kv.table import SlotTable
from looseleaf.link.oracle import low_rank, most_attended, most_deviating
from looseleaf.link.plan import Known, Lookup, Plan, Rows, flatten
from looseleaf.link.policies import Policy
from looseleaf.link.records import BLOCK, Keys
from looseleaf.model.adapter import Adapter
from looseleaf.model.lane import Deep, Entry, Lane
from looseleaf.model.rotary import rotate
from looseleaf.prompt.chunks import Canonical, Chunk, Prompt, Span, assemble
from looseleaf.store.protocol import Store


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


@dataclass(kw_only=True)
class Keep:
    """What may be left in the store, and for how long."""

    store: bool = True
    ttl_s: float | None = None


class Linked:
    """A sequence being linked: its table, and the rows still to be computed, handed out as lanes."""

    def __init__(self, linker: Linker, prompt: Prompt, plan: Plan, capacity: int):
        self.linker = linker
        self.prompt = prompt
        self.plan = plan
        self._seat: Seat | None = linker.pool.take(capacity)
        self.table = SlotTable(self._seat.slab.rows(self._seat.number, capacity), self._seat)
        self.table.taint_from(plan.exact_tokens)
        self.positions = prompt.positions_to(capacity).to(linker.adapter.device)
        self.features: dict[int, Features] = {}
        self.sources: list[tuple[Span, KVRows]] = []
        self.states: dict[int, list[tuple[Span, Tensor]]] = {}
        self.chosen: list[int] = []
        self.stages = Stages()
        self.done_to = 0
        self._bind: Callable[[int], None] | None = None

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
        span = range(self.done_to, stop)
        self.done_to = stop
        if self._bind is None:
            self._bind = self.linker.binder(self)
            link: Callable[[int], None] | None = self._bind
        else:
            link = None
        return self.linker.lane(self, span, link)

    def release(self) -> None:
        """Give the table's memory back; nothing may read this sequence any more."""
        if self._seat is not None:
            self.linker.pool.give_back(self._seat)
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


@dataclass
class Counters:
    """What the linker had to do beyond its plan."""

    vision_calls: int = 0
    chunks_computed: int = 0
    fallbacks: int = 0
    """Parts a plan counted on that were gone when fetched: computed again."""
    stored: int = 0


class Linker:
    """Links prompts for one model over one store. Not thread-safe: one engine owns it."""

    def __init__(
        self, adapter: Adapter, store: Store, canonical: Canonical, *, max_rows: int = 4096, idle_bytes: int = 2**30
    ):
        self.adapter = adapter
        self.store = store
        self.canonical = canonical
        self.max_rows = max_rows
        self.pool = SlabPool(adapter.layout, adapter.device, idle_bytes=idle_bytes)
        self.keys = Keys(adapter.fingerprint, adapter.layout, canonical)
        self.counters = Counters()

    def lookup(self, prompt: Prompt, policy: Policy) -> Lookup:
        """What the store has for this prompt. Touches nothing."""
        prefix = 0
        if policy.uses_prefix:
            for key in self.keys.blocks(prompt):
                if not self.store.contains(key):
                    break
                prefix += BLOCK
        return Lookup(prefix_tokens=prefix, chunks=tuple(self._known(span) for span in prompt.chunks))

    @torch.inference_mode()
    def link(self, prompt: Prompt, plan: Plan, *, capacity: int, keep: Keep) -> Linked:
        """Fetch and compute everything the plan's pass will read; the pass itself is `Linked.take`."""
        linked = Linked(self, prompt, plan, capacity)
        self._fetch_prefix(linked)
        started = time.perf_counter()
        self._fetch_features(linked, keep)
        linked.stages.vision_s = time.perf_counter() - started
        started = time.perf_counter()
        self._fetch_chunks(linked, keep)
        if plan.needs_oracle:
            self._ask_oracle(linked)
        linked.stages.chunks_s = time.perf_counter() - started
        return linked

    @torch.inference_mode()
    def warm(self, chunks: Sequence[Chunk], *, layers: Sequence[int] = (), keep: Keep | None = None) -> int:
        """Compute chunks that are not stored, and store them; how many were computed."""
        keep = keep or Keep()
        missing = {
            chunk.content: chunk
            for chunk in chunks
            if not self.store.contains(self.keys.kv(chunk))
            or any(not self.store.contains(self.keys.states(chunk, layer)) for layer in layers)
        }
        ready = [(chunk, self._features(chunk, keep)) for chunk in missing.values()]
        self._compute_chunks(ready, layers, keep)
        return len(missing)

    @torch.inference_mode()
    def harvest(self, linked: Linked, answer: tuple[int, ...], keep: Keep) -> None:
        """Leave the exact rows of a finished sequence behind as prefix blocks."""
        if not keep.store:
            return
        stop = min(linked.table.exact_tokens, len(linked.prompt) + len(answer))
        for at, key in enumerate(self.keys.blocks(linked.prompt, answer)):
            slots = range(at * BLOCK, (at + 1) * BLOCK)
            if slots.stop > stop:
                break
            if not self.store.contains(key):
                self._put(key, SequenceKV(rows=linked.table.copy_out(slots)), keep)

    def binder(self, linked: Linked) -> Callable[[int], None]:
        """A function that puts a layer's stored rows into the table: keys rotated once, values copied."""
        spans = [span for span, _ in linked.sources]
        if not spans:
            return lambda layer: None
        home = len(self.canonical.ids)
        places = [
            linked.positions[:, span.start : span.stop] if linked.plan.relocate
            else span.chunk.placement.positions.to(self.adapter.device) + home  # type: ignore[union-attr]
            for span in spans
        ]  # fmt: skip
        phase = self.adapter.decoder.phase(torch.cat(places, dim=1))
        form, table, at = self.adapter.decoder.form, linked.table.rows, 0
        bound = []
        for span, rows in linked.sources:
            bound.append((slice(span.start, span.stop), rows, phase[at : at + len(span)]))
            at += len(span)

        def bind(layer: int) -> None:
            started = time.perf_counter()
            keys, values = table.keys[layer], table.values[layer]
            for slots, rows, turned in bound:
                rotate(rows.keys[layer], turned, form, out=keys[:, slots])
                values[:, slots].copy_(rows.values[layer])
            linked.stages.link_s += time.perf_counter() - started

        return bind

    def lane(self, linked: Linked, span: range, link: Callable[[int], None] | None) -> Lane:
        """The plan's rows with slots in `span`, layer by layer."""
        entries: dict[int, Entry] = {}
        stay: dict[int, Callable[[list[int]], list[int]]] = {}
        current: list[int] = []
        for rows in linked.plan.rows:
            wanted = sorted({*(slot for slot in flatten(rows.slots) if slot in span), *self._chosen(linked, rows)})
            if rows.layer == 0:
                entries[0] = Entry(slots=wanted, hidden=self.embed(linked, wanted))
                current = wanted
                continue
            if rows.select is not None and rows.select.by == "deviation":
                stay[rows.layer] = self._deviation(linked, rows, wanted)
                continue
            kept, held = set(wanted), set(current)
            stay[rows.layer] = lambda before, kept=kept: [slot for slot in before if slot in kept]  # type: ignore[misc]
            entering = [slot for slot in wanted if slot not in held]
            if entering:
                entries[rows.layer] = Entry(slots=entering, hidden=_states_of(linked.states[rows.layer], entering))
            current = wanted
        return Lane(
            table=linked.table, positions=linked.positions, entries=entries, stay=stay, link=link,
            deep=self._deep(linked),
        )  # fmt: skip

    def embed(self, linked: Linked, slots: Sequence[int]) -> Tensor:
        """Input embeddings [row, width] of ascending slots: text from the embedding, visual rows from features."""
        ids, marked = linked.prompt.ids, torch.zeros(len(slots), dtype=torch.bool)
        visual: list[tuple[Tensor, Tensor]] = []
        for place, span in enumerate(linked.prompt.chunks):
            first, last = bisect_left(slots, span.start), bisect_left(slots, span.stop)
            if first == last or place not in linked.features or span.chunk is None:
                continue
            row_of = torch.full((len(span),), -1)
            row_of[torch.tensor(span.chunk.visual)] = torch.arange(len(span.chunk.visual))
            picked = row_of[torch.tensor(slots[first:last]) - span.start]
            rows = first + torch.nonzero(picked >= 0)[:, 0]
            marked[rows] = True
            visual.append((rows, linked.features[place].embeddings[picked[picked >= 0].to(self.adapter.device)]))
        words = torch.tensor([ids[slot] for slot in slots], dtype=torch.long).masked_fill_(
            marked, 0
        )  # markers may have no embedding
        hidden = self.adapter.decoder.embed(words.to(self.adapter.device))
        for rows, features in visual:
            hidden[rows.to(hidden.device)] = features.to(hidden.dtype)
        return hidden

    def _deep(self, linked: Linked) -> Deep | None:
        """Deepstack rows of all chunks whose features are at hand."""
        slots: list[int] = []
        features: list[Features] = []
        for place, span in enumerate(linked.prompt.chunks):
            if place in linked.features and linked.features[place].deep and span.chunk is not None:
                slots += [span.start + offset for offset in span.chunk.visual]
                features.append(linked.features[place])
        if not slots:
            return None
        return Deep(
            slots=slots, features=tuple(torch.cat(one) for one in zip(*(f.deep for f in features), strict=True))
        )

    def _chosen(self, linked: Linked, rows: Rows) -> list[int]:
        return linked.chosen if rows.select is not None and rows.select.by == "attention" else []

    def _deviation(self, linked: Linked, rows: Rows, always: list[int]) -> Callable[[list[int]], list[int]]:
        assert rows.select is not None
        share, below = rows.select.share, rows.layer - 1

        def choose(before: list[int]) -> list[int]:
            chosen = most_deviating(linked.table, self._open_sources(linked), below, share, self._turn(linked))
            kept = {*always, *chosen}
            return [slot for slot in before if slot in kept]

        return choose

    def _turn(self, linked: Linked) -> Callable[[Span, Tensor], Tensor]:
        decoder = self.adapter.decoder
        return lambda span, keys: rotate(keys, decoder.phase(linked.positions[:, span.start : span.stop]), decoder.form)

    def _open_sources(self, linked: Linked) -> list[tuple[Span, KVRows]]:
        """Reused chunks that are not exact where they stand: the ones a selection chooses among."""
        inexact = {piece.start for piece in linked.plan.pieces if piece.use == "reuse" and not piece.exact}
        return [(span, rows) for span, rows in linked.sources if span.start in inexact]

    def _known(self, span: Span) -> Known:
        chunk = span.chunk
        assert chunk is not None
        return Known(
            kv=self.store.contains(self.keys.kv(chunk)),
            features=not chunk.visual or self.store.contains(self.keys.features(chunk)),
        )

    def _fetch_prefix(self, linked: Linked) -> None:
        """Copy stored prefix rows into the table; a block that is gone ends the prefix there."""
        tokens = linked.plan.prefix_tokens
        table, keys = linked.table.rows, self.keys.blocks(linked.prompt)
        for start in range(0, tokens, BLOCK):
            record = self.store.get(next(keys))
            if not isinstance(record, SequenceKV):
                self._shorten_prefix(linked, start)
                return
            stop = min(start + BLOCK, tokens)
            for layer in range(len(table.keys)):
                table.keys[layer][:, start:stop] = record.rows.keys[layer][:, : stop - start]
                table.values[layer][:, start:stop] = record.rows.values[layer][:, : stop - start]
        linked.done_to = tokens

    def _shorten_prefix(self, linked: Linked, tokens: int) -> None:
        """Go on with what is left of a prefix: everything behind it is computed."""
        self.counters.fallbacks += 1
        pieces = tuple(
            replace(piece, use="compute", stored=False) if piece.stop > tokens else piece
            for piece in linked.plan.pieces
        )
        rows = replace(linked.plan.rows[0], slots=(range(tokens, len(linked.prompt)),))
        linked.plan = replace(linked.plan, prefix_tokens=tokens, pieces=pieces, rows=(rows,))
        linked.done_to = tokens

    def _fetch_features(self, linked: Linked, keep: Keep) -> None:
        """Features of every chunk some of whose rows will be computed."""
        plan, missing = linked.plan, set(linked.plan.missing)
        pieces = {piece.start: piece for piece in plan.pieces}
        for place, span in enumerate(linked.prompt.chunks):
            piece = pieces[span.start]
            computed = piece.use == "compute" or piece.recomputed or plan.needs_oracle or place in missing
            if computed and span.chunk is not None and span.chunk.visual and span.stop > plan.prefix_tokens:
                linked.features[place] = self._features(span.chunk, keep)  # type: ignore[assignment]

    def _features(self, chunk: Chunk, keep: Keep) -> Features | None:
        """A chunk's visual rows, from the store or from the vision tower."""
        if not chunk.visual:
            return None
        key = self.keys.features(chunk)
        found = self.store.get(key)
        if isinstance(found, Features):
            return found
        self.counters.vision_calls += 1
        features = self.adapter.see(chunk.inputs)
        assert len(features.embeddings) == len(chunk.visual), "the processor and the vision tower disagree on tokens"
        self._put(key, features, keep)
        return features

    def _fetch_chunks(self, linked: Linked, keep: Keep) -> None:
        """KV (and boundary states) of every reused chunk: from the store, else computed in the canonical context."""
        plan = linked.plan
        if plan.keys_rank is not None:
            return
        reused = {piece.start for piece in plan.pieces if piece.use == "reuse"}
        layers = [rows.layer for rows in plan.rows if rows.from_states]
        wanted = [(place, span) for place, span in enumerate(linked.prompt.chunks) if span.start in reused]
        held: dict[str, tuple[ChunkKV, dict[int, States]]] = {}
        missing: dict[str, tuple[Chunk, Features | None]] = {}
        for place, span in wanted:
            chunk = span.chunk
            assert chunk is not None
            if chunk.content in held or chunk.content in missing:
                continue
            record = self._stored(chunk, layers)
            if record is not None:
                held[chunk.content] = record
                continue
            self.counters.fallbacks += place not in plan.missing and not layers
            missing[chunk.content] = (chunk, linked.features.get(place) or self._features(chunk, keep))
        for (chunk, _), record in zip(
            missing.values(), self._compute_chunks(list(missing.values()), layers, keep), strict=True
        ):
            held[chunk.content] = record
        for _, span in wanted:
            assert span.chunk is not None
            kv, states = held[span.chunk.content]
            linked.sources.append((span, kv.rows))
            for layer, state in states.items():
                linked.states.setdefault(layer, []).append((span, state.hidden))

    def _stored(self, chunk: Chunk, layers: Sequence[int]) -> tuple[ChunkKV, dict[int, States]] | None:
        kv = self.store.get(self.keys.kv(chunk))
        states = {layer: self.store.get(self.keys.states(chunk, layer)) for layer in layers}
        if not isinstance(kv, ChunkKV) or not all(isinstance(one, States) for one in states.values()):
            return None
        return kv, states  # type: ignore[return-value]

    def _compute_chunks(
        self, chunks: Sequence[tuple[Chunk, Features | None]], layers: Sequence[int], keep: Keep
    ) -> list[tuple[ChunkKV, dict[int, States]]]:
        """Chunks alone in the canonical context, several to a pass; keys are captured un-rotated."""
        done: list[tuple[ChunkKV, dict[int, States]]] = []
        batch: list[tuple[Chunk, Features | None]] = []
        rows = 0
        for each in chunks:
            size = len(self.canonical.ids) + len(each[0])
            if batch and rows + size > self.max_rows:
                done += self._compute_batch(batch, layers, keep)
                batch, rows = [], 0
            batch.append(each)
            rows += size
        return done + (self._compute_batch(batch, layers, keep) if batch else [])

    def _compute_batch(
        self, chunks: Sequence[tuple[Chunk, Features | None]], layers: Sequence[int], keep: Keep
    ) -> list[tuple[ChunkKV, dict[int, States]]]:
        adapter, start = self.adapter, len(self.canonical.ids)
        lanes, alone = [], []
        for chunk, features in chunks:
            prompt = assemble([self.canonical.ids, chunk], axes=adapter.axes)
            linked = Linked(self, prompt, _compute_all(prompt), len(prompt))
            if features is not None:
                linked.features[0] = features
            lane = self.lane(linked, range(len(prompt)), None)
            lane.capture = Capture(rows=KVRows(adapter.layout, len(chunk), adapter.device), first=start)
            lane.states = dict.fromkeys(layers)
            lanes.append(lane)
            alone.append(linked)
        adapter.decoder.run(lanes)
        for linked in alone:
            linked.release()
        self.counters.chunks_computed += len(lanes)
        done = []
        for (chunk, _), lane in zip(chunks, lanes, strict=True):
            assert lane.capture is not None
            assert lane.capture.rows is not None
            kv = ChunkKV(rows=lane.capture.rows)
            states = {
                layer: States(layer=layer, hidden=hidden[start:])
                for layer, hidden in lane.states.items()
                if hidden is not None
            }
            self._put(self.keys.kv(chunk), kv, keep)
            for layer, state in states.items():
                self._put(self.keys.states(chunk, layer), state, keep)
            done.append((kv, states))
        return done

    def _ask_oracle(self, linked: Linked) -> None:
        """A full prefill in a table of its own, for the offline controls."""
        adapter, prompt = self.adapter, linked.prompt
        scratch = Linked(self, prompt, _compute_all(prompt), len(prompt))
        scratch.features = linked.features
        lane = self.lane(scratch, range(len(prompt)), None)
        question = prompt.chunks[-1].stop if prompt.chunks else 0
        rows = KVRows(adapter.layout, len(prompt), adapter.device) if linked.plan.keys_rank is not None else None
        lane.capture = Capture(rows=rows, mass_from=question if rows is None else None)
        adapter.decoder.run([lane])
        scratch.release()
        if rows is not None:
            reused = {piece.start for piece in linked.plan.pieces if piece.use == "reuse"}
            spans = [span for span in prompt.chunks if span.start in reused]
            assert linked.plan.keys_rank is not None
            linked.sources = [(span, low_rank(rows, span, linked.plan.keys_rank)) for span in spans]
            return
        share = next(rows.select.share for rows in linked.plan.rows if rows.select is not None)
        assert lane.capture.mass is not None
        linked.chosen = most_attended(lane.capture.mass, [span for span, _ in self._open_sources(linked)], share)

    def _put(self, key: object, record: object, keep: Keep) -> None:
        if keep.store:
            self.counters.stored += self.store.put(key, record, ttl_s=keep.ttl_s)  # type: ignore[arg-type]


def _states_of(states: Sequence[tuple[Span, Tensor]], slots: Sequence[int]) -> Tensor:
    """Boundary states [row, width] of ascending slots that lie in these spans."""
    parts = []
    for span, hidden in states:
        first, last = bisect_left(slots, span.start), bisect_left(slots, span.stop)
        parts.append(hidden[[slot - span.start for slot in slots[first:last]]])
    return torch.cat(parts)


def _compute_all(prompt: Prompt) -> Plan:
    """A plan that computes every row: chunks alone, and the oracle's prefill."""
    rows = (Rows(layer=0, slots=(range(len(prompt)),)),)
    return Plan(policy="reprefill", tokens=len(prompt), prefix_tokens=0, pieces=(), rows=rows, exact_tokens=len(prompt))
