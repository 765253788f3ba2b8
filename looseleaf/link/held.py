"""Rows a window holds of its chunks: as they were computed in it, keys un-rotated, bound again wherever they stand now.

A request carries them; chunks it had to compute are added when it ends. They are exact as long as what stands in front
of a chunk is what it was computed behind; otherwise the answer is approximate and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from looseleaf.kv.layout import KVRows
from looseleaf.link.records import Antecedent, antecedents
from looseleaf.link.sequence import Linked
from looseleaf.prompt.chunks import Prompt, Span


@dataclass(frozen=True, kw_only=True)
class Conditioned:
    """A chunk's rows in one context."""

    rows: KVRows
    content: str
    """The chunk's."""
    antecedent: Antecedent
    exact: bool
    """Whether everything in front of it was exact."""


@dataclass
class Held:
    """By a chunk's place among the prompt's: its rows, and which shall be bound as they are stored, without context."""

    rows: dict[int, Conditioned] = field(default_factory=dict)
    clean: frozenset[int] = frozenset()

    def states(self, prompt: Prompt) -> dict[int, str]:
        """By a chunk's place: `exact`, `kept` (computed behind something else), `clean`, or nothing."""
        before = antecedents(prompt)
        return {place: self._state(place, span, before[span.start]) for place, span in enumerate(prompt.chunks)}

    def take(self, linked: Linked) -> None:
        """Add the rows a finished sequence had in context: computed, of an equal prefix, or patched."""
        pieces, before = {piece.start: piece for piece in linked.plan.pieces}, antecedents(linked.prompt)
        for place, span in enumerate(linked.prompt.chunks):
            piece = pieces[span.start]
            in_context = piece.use in ("compute", "exact") or piece.patched
            if not in_context or place in self.rows or place in self.clean:
                continue
            assert span.chunk is not None
            self.rows[place] = Conditioned(
                rows=linked.unrotated(span), content=span.chunk.content, antecedent=before[span.start],
                exact=piece.exact and span.stop <= linked.table.exact_tokens,
            )  # fmt: skip

    def _state(self, place: int, span: Span, antecedent: Antecedent) -> str:
        if place in self.clean:
            return "clean"
        one = self.rows.get(place)
        if one is None or span.chunk is None or one.content != span.chunk.content:
            return ""
        return "exact" if one.exact and one.antecedent.exact == antecedent.exact else "kept"
