"""What stands in a window."""

from __future__ import annotations

from dataclasses import dataclass

from looseleaf.link.held import Conditioned
from looseleaf.prompt.segments import Segment


@dataclass(frozen=True, kw_only=True)
class Page:
    """Something in a window, or evicted from it: frozen, so that branches can share it."""

    number: int
    segment: Segment
    tokens: int
    kept: Conditioned | None = None
    """Its rows as they were computed in this window; None until a question needed them, and for words."""
    clean: bool = False
    """Whether it is shown as it was computed alone."""
    lacks: frozenset[str] = frozenset()
    """Contents that stand before it now and that its rows serve without."""

    @property
    def is_chunk(self) -> bool:
        """Whether it has rows of its own: all but words."""
        return not isinstance(self.segment, str)
