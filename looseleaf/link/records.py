"""Records by identity: which key a chunk's parts and a prefix's blocks have, for one model and canonical context.

The only place that composes keys. A key covers everything that makes the tensors under it valid; a prompt's words are
in a block's key and never in a chunk's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import transformers

from looseleaf.identity import digest
from looseleaf.kv.layout import KVLayout
from looseleaf.link.policies import PatchForm
from looseleaf.prompt.chunks import Canonical, Chunk, Prompt
from looseleaf.store.protocol import Key

RECORDS = 1
"""To be raised when the same inputs give other rows or patches than before."""
BLOCK = 32
"""Tokens in one block of a stored prefix."""


MANY = 32
"""Chunks in front of a chunk up to which a patch is also found with one of them missing."""


class Antecedent(NamedTuple):
    """Everything in front of a chunk, and the chunks alone among it."""

    exact: str
    """Digest of words, chunks, and where they stand from the chunk. Not of where the chunk itself stands: attention
    goes by distances, so that a prompt moved as a whole has the same deficits."""
    chunks: tuple[str, ...]
    """What the chunks in front are, in order."""


def antecedents(prompt: Prompt) -> dict[int, Antecedent]:
    """By a chunk's first slot: what stands in front of it."""
    found: dict[int, Antecedent] = {}
    chunks: list[str] = []
    running, last_pos = "", prompt.spans[0].start_pos if prompt.spans else 0
    for span in prompt.spans:
        running = digest("antecedent", before=running, step=span.start_pos - last_pos)
        if span.chunk is not None:
            found[span.start] = Antecedent(exact=running, chunks=tuple(chunks))
            chunks.append(span.chunk.content)
        what = span.chunk.content if span.chunk else digest("words", ids=prompt.ids[span.start : span.stop])
        running = digest("antecedent", before=running, what=what)
        last_pos = span.start_pos
    return found


class Keys:
    """Composes the keys of one model's records."""

    def __init__(self, fingerprint: str, layout: KVLayout, canonical: Canonical):
        # stored records outlive the code that made them
        made_by = {"transformers": transformers.__version__, "records": RECORDS}
        self._model = digest("keys", model=fingerprint, layout=layout.describe(), made_by=made_by)
        self._canonical = canonical.identity

    def features(self, chunk: Chunk) -> Key:
        """A chunk's visual rows: no context in them."""
        return Key(digest("features", model=self._model, chunk=chunk.content), "features")

    def kv(self, chunk: Chunk) -> Key:
        """A chunk's keys and values, computed in the canonical context, un-rotated."""
        return Key(self._record(chunk), "kv")

    def states(self, chunk: Chunk, layer: int) -> Key:
        """A chunk's hidden states as they enter `layer`, in the canonical context."""
        return Key(self._record(chunk), f"states@{layer}")

    def blocks(self, prompt: Prompt, answer: tuple[int, ...] = ()) -> Iterator[Key]:
        """Keys of the whole blocks of a prompt (and of an answer behind it), in order."""
        running = digest("prefix", model=self._model)
        ids = prompt.ids + answer
        positions = prompt.positions_to(len(ids)).T.contiguous().numpy()
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            stop = start + BLOCK
            held = [
                (span.start - start, span.chunk.content)
                for span in prompt.chunks
                if span.chunk is not None and span.start < stop and span.stop > start
            ]
            placed = positions[start:stop].tobytes()  # an answer behind a clip stands further out than text would
            running = digest("block", before=running, ids=ids[start:stop], positions=placed, chunks=held)
            yield Key(running, "sequence")

    def patch(self, chunk: Chunk, antecedent: Antecedent, form: PatchForm) -> Key:
        """What a chunk's KV lacks behind one antecedent, as far as patches of this form keep it."""
        return Key(self._patch(chunk, antecedent.exact, form), "patch")

    def close(self, drift: str, chunk: Chunk, antecedent: Antecedent, form: PatchForm) -> Key | None:
        """Where it says which patch was made last behind an antecedent that differs by a drift; None if none can be."""
        before = antecedent.chunks
        if drift == "again":
            once = tuple(dict.fromkeys(before))
            return None if once == before else self._close("words", chunk, once, form)
        return self._close(drift, chunk, sorted(before) if drift == "order" else before, form)

    def found_by(self, chunk: Chunk, antecedent: Antecedent, form: PatchForm) -> Iterator[Key]:
        """Where to say that a patch was made behind this antecedent."""
        before = antecedent.chunks
        yield self._close("words", chunk, before, form)
        yield self._close("order", chunk, sorted(before), form)
        for gone in sorted(set(before)) if len(before) <= MANY else ():
            left = list(before)
            left.remove(gone)
            yield self._close("fewer", chunk, left, form)

    def _close(self, drift: str, chunk: Chunk, before: Sequence[str], form: PatchForm) -> Key:
        return Key(self._patch(chunk, digest("close", drift=drift, chunks=" ".join(before)), form), "close")

    def _patch(self, chunk: Chunk, antecedent: str, form: PatchForm) -> str:
        made = {"share": form.share, "from_layer": form.from_layer}
        return digest("patch", record=self._record(chunk), antecedent=antecedent, form=made)

    def _record(self, chunk: Chunk) -> str:
        return digest("record", model=self._model, canonical=self._canonical, chunk=chunk.content)
