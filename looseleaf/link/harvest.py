"""Harvest: the request that computes a chunk in context leaves its patch behind, for one forward of the chunk alone.

What it computed is written down when its answer is out; the patch is formed when nobody waits for the model. Only exact
rows are taken: a patch made behind a patched chunk would carry that one's error on. A request in a hurry leaves its
prompt instead, which is computed in context then.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import ChunkKV, Pointer
from looseleaf.link.linker import Keep, Linker
from looseleaf.link.policies import PatchForm
from looseleaf.link.records import Antecedent, antecedents
from looseleaf.link.sequence import Linked
from looseleaf.patch.form import form_patch
from looseleaf.prompt.build import LazyInputs
from looseleaf.prompt.chunks import Chunk, Prompt, Span
from looseleaf.store.protocol import Key

log = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
"""Of rows that wait; beyond it the oldest are let go."""
PRESSING = 64
"""Chunks waiting from which on one is worked off in front of every pass; half of the room taken does it too."""


@dataclass(frozen=True, kw_only=True)
class _Conditioned:
    """A chunk's rows in one context, keys un-rotated, and where its patch goes."""

    chunk: Chunk
    rows: KVRows
    antecedent: Antecedent
    form: PatchForm
    key: Key
    keep: Keep

    @property
    def keys(self) -> tuple[Key, ...]:
        """Of the patch, alone."""
        return (self.key,)

    @property
    def nbytes(self) -> int:
        """Bytes held while it waits, what its chunk would be seen by included."""
        return self.rows.nbytes + _seen_by(self.chunk)


@dataclass(frozen=True, kw_only=True)
class _Unseen:
    """A prompt that was not computed in context and shall be, for its chunks' patches."""

    prompt: Prompt
    form: PatchForm
    keys: tuple[Key, ...]
    """Of the patches that are missing."""
    keep: Keep

    @property
    def nbytes(self) -> int:
        """Bytes held while it waits: its tokens and positions, and what its chunks would be seen by."""
        seen_by = sum(_seen_by(span.chunk) for span in self.prompt.chunks if span.chunk is not None)
        return seen_by + self.prompt.positions.nbytes + 8 * len(self.prompt)


def _seen_by(chunk: Chunk) -> int:
    """Bytes of the inputs a chunk holds already; those not made yet are not made to be counted."""
    made = chunk.inputs.made if isinstance(chunk.inputs, LazyInputs) else chunk.inputs
    return sum(one.nbytes for one in made.values())


@dataclass
class HarvestCounters:
    """What came of it."""

    patches: int = 0
    prompts: int = 0
    """Computed in context once more, for requests that had not."""
    patch_bytes: int = 0
    page_bytes: int = 0
    """Of the chunks they are for."""
    dropped: int = 0
    """Left alone for want of room."""
    failed: int = 0
    """Given up because computing or storing them failed."""


class Harvest:
    """Patches on their way into the store. Used by the engine alone, under its lock."""

    def __init__(self, linker: Linker, *, most_bytes: int = MOST_BYTES):
        self._linker = linker
        self._most_bytes = most_bytes
        self._waiting: deque[tuple[_Conditioned | _Unseen, int]] = deque()
        """With the bytes each was counted at."""
        self._keys: set[Key] = set()
        self._held_bytes = 0
        self.counters = HarvestCounters()

    @property
    def waiting(self) -> int:
        """Chunks whose patch is still to be formed, and prompts to be computed for theirs."""
        return len(self._waiting)

    @property
    def pressing(self) -> bool:
        """Whether so many wait that one should be worked off now."""
        return len(self._waiting) >= PRESSING or self._held_bytes > self._most_bytes / 2

    @torch.inference_mode()
    def note(self, linked: Linked, keep: Keep) -> None:
        """Write down the chunks a finished sequence computed in context, as far as its rows are exact."""
        plan = linked.plan
        if plan.patch is None or not keep.store or not keep.harvest:
            return
        try:
            computed = {piece.start for piece in plan.pieces if piece.use == "compute" and piece.exact}
            unpatched = {
                piece.start for piece in plan.pieces if piece.use == "reuse" and not (piece.exact or piece.patched)
            }
            missing = []
            for span, antecedent, key in self._missing(linked.prompt, plan.patch):
                if span.start in computed and span.stop <= linked.table.exact_tokens:
                    self._add_chunk(span, antecedent, linked.unrotated(span), plan.patch, key, keep)
                elif span.start in unpatched:
                    missing.append(key)
            if plan.later and missing:
                self._add(_Unseen(prompt=linked.prompt, form=plan.patch, keys=tuple(missing), keep=keep))
        except Exception:
            self._give_up()

    def _missing(self, prompt: Prompt, form: PatchForm) -> Iterator[tuple[Span, Antecedent, Key]]:
        """A prompt's chunks whose patch is neither stored nor on its way, and the patch's key."""
        linker, before = self._linker, antecedents(prompt)
        for span in prompt.chunks:
            assert span.chunk is not None
            key = linker.keys.patch(span.chunk, before[span.start], form)
            if key not in self._keys and not linker.store.contains(key):
                yield span, before[span.start], key

    def _add_chunk(
        self, span: Span, antecedent: Antecedent, rows: KVRows, form: PatchForm, key: Key, keep: Keep
    ) -> None:
        assert span.chunk is not None
        self._add(_Conditioned(chunk=span.chunk, rows=rows, antecedent=antecedent, form=form, key=key, keep=keep))

    @torch.inference_mode()
    def work(self, *, hurry: bool = False) -> bool:
        """Form one patch and store it, or compute one prompt for its patches; False when nothing waits.

        In a hurry prompts are let go: requests that wait come first.
        """
        if not self._waiting:
            return False
        one = self._pop()
        if hurry and isinstance(one, _Unseen):
            self.counters.dropped += 1
            return True
        try:
            if isinstance(one, _Unseen):
                self._compute(one)
            else:
                self._form(one)
        except Exception:
            self._give_up()
        return True

    def clear(self) -> None:
        """Let go of everything that waits."""
        while self._waiting:
            self._pop()

    def _compute(self, one: _Unseen) -> None:
        """A prompt in context, as a request that is not in a hurry would have."""
        missing = [each for each in self._missing(one.prompt, one.form) if each[2] in one.keys]
        if not missing:
            return
        if len(one.prompt) > self._linker.max_rows:  # as long as no pass may be
            self.counters.dropped += 1
            return
        rows = self._linker.prefill(one.prompt, one.keep)
        self.counters.prompts += 1
        for span, antecedent, key in missing:
            self._add_chunk(span, antecedent, rows.part(span.start, span.stop).copy(), one.form, key, one.keep)

    def _form(self, one: _Conditioned) -> None:
        linker, store = self._linker, self._linker.store
        linker.warm([one.chunk], keep=one.keep)
        alone = store.get(linker.keys.kv(one.chunk))
        if not isinstance(alone, ChunkKV):  # the store is too small for it, and a patch would be of no use
            return
        patch = form_patch(one.rows, alone.rows, share=one.form.share, from_layer=one.form.from_layer)
        if store.put(one.key, patch, ttl_s=one.keep.ttl_s):
            for key in linker.keys.found_by(one.chunk, one.antecedent, one.form):
                store.put(key, Pointer(identity=one.key.identity), ttl_s=one.keep.ttl_s)
            self.counters.patches += 1
            self.counters.patch_bytes += patch.nbytes
            self.counters.page_bytes += alone.nbytes

    def _add(self, one: _Conditioned | _Unseen) -> None:
        size = one.nbytes  # now: it grows when a chunk's inputs are made while it waits
        if size > self._most_bytes:
            self.counters.dropped += 1
            return
        self._waiting.append((one, size))
        self._keys.update(one.keys)
        self._held_bytes += size
        while self._held_bytes > self._most_bytes:
            self._pop()
            self.counters.dropped += 1

    def _pop(self) -> _Conditioned | _Unseen:
        one, size = self._waiting.popleft()
        self._keys.difference_update(one.keys)
        self._held_bytes -= size
        return one

    def _give_up(self) -> None:
        log.exception("a patch could not be left behind; the next request computes what it would have spared")
        self.counters.failed += 1
