"""The linker: makes a sequence's KV from a plan.

Fetches stored parts and computes what is missing: vision, then chunks alone in the canonical context. The result, a
`Linked` sequence, hands out the rows of the one pass that remains. It decides nothing; what the plan says and the store
no longer has is computed and counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.kv.pool import SlabPool
from looseleaf.kv.records import ChunkKV, Features, Patch, Pointer, SequenceKV, States
from looseleaf.link.held import Held
from looseleaf.link.oracle import low_rank, most_attended
from looseleaf.link.plan import Known, Lookup, Plan, Rows, compute_instead, merge, plan_link
from looseleaf.link.policies import PatchForm, Policy
from looseleaf.link.records import BLOCK, Antecedent, Keys, antecedents
from looseleaf.link.sequence import Linked
from looseleaf.model.adapter import Adapter
from looseleaf.prompt.chunks import Canonical, Chunk, Prompt, Span, assemble
from looseleaf.store.protocol import Key, Store


@dataclass(kw_only=True)
class Keep:
    """What may be left in the store, and for how long."""

    store: bool = True
    harvest: bool = True
    """Whether patches and prefixes may be made of this prompt's rows."""
    ttl_s: float | None = None


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

    def lookup(self, prompt: Prompt, policy: Policy, held: Held | None = None) -> Lookup:
        """What the store and a window have for this prompt. Reads nothing but pointers to close patches."""
        prefix = 0
        serves = policy.reuses_chunks and policy.relocate and policy.keys_rank is None
        states = held.states(prompt) if held is not None and serves else {}
        before = antecedents(prompt) if policy.patch is not None else {}
        if policy.uses_prefix:
            for key in self.keys.blocks(prompt):
                if not self.store.contains(key):
                    break
                prefix += BLOCK
        return Lookup(
            prefix_tokens=prefix,
            chunks=tuple(
                self._known(span, policy, before.get(span.start), states.get(place, ""))
                for place, span in enumerate(prompt.chunks)
            ),
        )

    def plan(self, prompt: Prompt, policy: Policy, held: Held | None = None) -> Plan:
        """What a policy reads and computes of a prompt now."""
        layers = len(self.adapter.layout.layers)
        return plan_link(prompt, self.lookup(prompt, policy, held), policy, layers=layers, canonical=self.canonical)

    @torch.inference_mode()
    def link(self, prompt: Prompt, plan: Plan, *, capacity: int, keep: Keep, held: Held | None = None) -> Linked:
        """Fetch and compute everything the plan's pass will read; the pass itself is `Linked.take`."""
        linked = self._start(prompt, plan, capacity)
        try:
            self.prefetch(prompt, plan)  # what is stored comes while what is missing is computed
            self._fetch_prefix(linked)
            self._fetch_patches(linked)
            started = time.perf_counter()
            self._fetch_features(linked, keep)
            linked.stages.vision_s = time.perf_counter() - started
            started = time.perf_counter()
            self._fetch_chunks(linked, keep, held)
            if plan.needs_oracle:
                self._ask_oracle(linked)
            linked.stages.chunks_s = time.perf_counter() - started
        except BaseException:
            linked.release()
            raise
        return linked

    def expect(self, prompt: Prompt, policy: Policy) -> None:
        """A prompt waits in line: tell the store what it will probably want. May be called from any thread."""
        if policy.reuses_chunks:
            self.store.prefetch(self.keys.kv(span.chunk) for span in prompt.chunks if span.chunk is not None)

    def prefetch(self, prompt: Prompt, plan: Plan) -> None:
        """Tell the store which records this plan will read."""
        reused = {piece.start for piece in plan.pieces if piece.use == "reuse" and not piece.kept}
        layers = [rows.layer for rows in plan.rows if rows.from_states]
        chunks = {span.chunk.content: span.chunk for span in prompt.chunks if span.chunk and span.start in reused}
        self.store.prefetch(
            key
            for chunk in chunks.values()
            for key in (self.keys.kv(chunk), *(self.keys.states(chunk, layer) for layer in layers))
        )

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
        if not keep.store or not keep.harvest:
            return
        stop = min(linked.table.exact_tokens, len(linked.prompt) + len(answer))
        for at, key in enumerate(self.keys.blocks(linked.prompt, answer)):
            slots = range(at * BLOCK, (at + 1) * BLOCK)
            if slots.stop > stop:
                break
            if not self.store.contains(key):
                self._put(key, SequenceKV(rows=linked.table.copy_out(slots)), keep)

    @torch.inference_mode()
    def prefill(self, prompt: Prompt, keep: Keep) -> KVRows:
        """Every row of a prompt, computed in context, keys un-rotated; nothing of them is stored."""
        rows = KVRows(self.adapter.layout, len(prompt), self.adapter.device)
        features = {
            place: found
            for place, span in enumerate(prompt.chunks)
            if span.chunk is not None and (found := self._features(span.chunk, keep)) is not None
        }
        self._run_alone(prompt, features, Capture(rows=rows))
        return rows

    def _run_alone(self, prompt: Prompt, features: dict[int, Features], capture: Capture) -> None:
        """One pass over all rows of a prompt, in a table of its own."""
        scratch = self._start(prompt, _compute_all(prompt), len(prompt))
        scratch.features = features
        try:
            lane = scratch.take(len(prompt))
            lane.capture = capture
            self.adapter.decoder.run([lane])
        finally:
            scratch.release()

    def _start(self, prompt: Prompt, plan: Plan, capacity: int) -> Linked:
        home_pos = len(self.canonical.ids)
        return Linked(self.adapter, self.pool, prompt, plan, capacity=capacity, home_pos=home_pos)

    def _known(self, span: Span, policy: Policy, antecedent: Antecedent | None, held: str) -> Known:
        chunk = span.chunk
        assert chunk is not None
        patch = ""
        if policy.patch is not None and antecedent is not None:
            found = self._find_patch(chunk, antecedent, policy.patch, policy.drifts)
            patch = found[0] if found else ""
        return Known(
            kv=self.store.contains(self.keys.kv(chunk)),
            features=not chunk.visual or self.store.contains(self.keys.features(chunk)),
            patch=patch,
            held=held,
        )

    def _find_patch(
        self, chunk: Chunk, antecedent: Antecedent, form: PatchForm, drifts: Sequence[str]
    ) -> tuple[str, Key] | None:
        """The best patch there is, `exact` or by which drift, and its key."""
        key = self.keys.patch(chunk, antecedent, form)
        if self.store.contains(key):
            return "exact", key
        for drift in drifts:
            close = self.keys.close(drift, chunk, antecedent, form)
            pointer = self.store.get(close) if close is not None else None
            if isinstance(pointer, Pointer) and self.store.contains(key := Key(pointer.identity, "patch")):
                return drift, key
        return None

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
        """Go on with what is left of a prefix: what it had behind that is computed."""
        self.counters.fallbacks += 1
        plan = linked.plan
        pieces = tuple(
            replace(piece, use="compute", stored=False) if piece.use == "exact" and piece.stop > tokens else piece
            for piece in plan.pieces
        )
        (rows,) = plan.rows  # policies with prefixes compute whole spans through all layers
        more = [
            range(max(piece.start, tokens), min(piece.stop, plan.prefix_tokens))
            for piece in pieces
            if piece.use == "compute" and piece.start < plan.prefix_tokens
        ]
        slots = merge([*rows.slots, *more])
        linked.plan = replace(plan, prefix_tokens=tokens, pieces=pieces, rows=(replace(rows, slots=slots),))
        linked.done_to = tokens

    def _fetch_patches(self, linked: Linked) -> None:
        """Patches the plan counts on; a chunk whose patch is gone is computed in context."""
        plan = linked.plan
        if plan.patch is None:
            return
        before, gone = antecedents(linked.prompt), set()
        patched = {piece.start for piece in plan.pieces if piece.patched}
        for span in linked.prompt.chunks:
            if span.start in patched:
                assert span.chunk is not None
                found = self._find_patch(span.chunk, before[span.start], plan.patch, plan.drifts)
                patch = self.store.get(found[1]) if found else None
                if isinstance(patch, Patch):
                    linked.patches[span.start] = patch
                else:
                    gone.add(span.start)
        if gone:
            self.counters.fallbacks += len(gone)
            linked.plan = compute_instead(plan, gone)

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

    def _fetch_chunks(self, linked: Linked, keep: Keep, window: Held | None) -> None:
        """Rows (and boundary states) of every reused chunk: a window's, the store's, or computed alone."""
        plan = linked.plan
        if plan.keys_rank is not None:
            return
        reused = {piece.start for piece in plan.pieces if piece.use == "reuse" and not piece.kept}
        if window is not None:
            kept = {piece.start for piece in plan.pieces if piece.kept}
            linked.sources += (
                (span, window.rows[place].rows) for place, span in enumerate(linked.prompt.chunks) if span.start in kept
            )
        layers = [rows.layer for rows in plan.rows if rows.from_states]
        wanted = [(place, span) for place, span in enumerate(linked.prompt.chunks) if span.start in reused]
        places: dict[str, tuple[int, Chunk]] = {}
        for place, span in wanted:
            assert span.chunk is not None
            places.setdefault(span.chunk.content, (place, span.chunk))
        held: dict[str, tuple[ChunkKV, dict[int, States]]] = {}

        def compute(missing: Sequence[str]) -> None:
            ready = [
                (places[one][1], linked.features.get(places[one][0]) or self._features(places[one][1], keep))
                for one in missing
            ]
            held.update(zip(missing, self._compute_chunks(ready, layers, keep), strict=True))

        # first what is missing: what is stored is on its way meanwhile
        compute([one for one, (place, _) in places.items() if place in plan.missing])
        gone = []
        for one, (_, chunk) in places.items():
            record = held.get(one) or self._stored(chunk, layers)
            if record is not None:
                held[one] = record
            else:
                gone.append(one)
        self.counters.fallbacks += len(gone) if not layers else 0
        compute(gone)
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
            linked = self._start(prompt, _compute_all(prompt), len(prompt))
            if features is not None:
                linked.features[0] = features
            lane = linked.take(len(prompt))
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
        question = prompt.chunks[-1].stop if prompt.chunks else 0
        rows = KVRows(adapter.layout, len(prompt), adapter.device) if linked.plan.keys_rank is not None else None
        capture = Capture(rows=rows, mass_from=question if rows is None else None)
        self._run_alone(prompt, linked.features, capture)
        if rows is not None:
            reused = {piece.start for piece in linked.plan.pieces if piece.use == "reuse"}
            spans = [span for span in prompt.chunks if span.start in reused]
            assert linked.plan.keys_rank is not None
            linked.sources = [(span, low_rank(rows, span, linked.plan.keys_rank)) for span in spans]
            return
        share = next(rows.select.share for rows in linked.plan.rows if rows.select is not None)
        assert capture.mass is not None
        linked.chosen = most_attended(capture.mass, [span for span, _ in linked.open_sources()], share)

    def _put(self, key: object, record: object, keep: Keep) -> None:
        if keep.store:
            self.counters.stored += self.store.put(key, record, ttl_s=keep.ttl_s)  # type: ignore[arg-type]


def _compute_all(prompt: Prompt) -> Plan:
    """A plan that computes every row: chunks alone, and the oracle's prefill."""
    rows = (Rows(layer=0, slots=(range(len(prompt)),)),)
    return Plan(policy="reprefill", tokens=len(prompt), prefix_tokens=0, pieces=(), rows=rows, exact_tokens=len(prompt))
