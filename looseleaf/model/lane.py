"""A lane: what one sequence contributes to a packed pass through the decoder.

Data only. The linker fills lanes, the decoder obeys them. Row sets may shrink from layer to layer (a policy stops
computing some rows) and grow only by rows that enter with a hidden state of their own (embeddings in front of layer 0,
stored boundary states further up).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from looseleaf.kv.attention import Capture
from looseleaf.kv.table import SlotTable


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Rows that join in front of a layer: their slots, ascending, and their hidden states [row, width]."""

    slots: list[int]
    hidden: Tensor


@dataclass(frozen=True, kw_only=True)
class Deep:
    """Deepstack: what is added to visual rows behind each of the first layers. features: one [row, width] per layer."""

    slots: list[int]
    features: tuple[Tensor, ...]


@dataclass(kw_only=True)
class Lane:
    """One sequence's part of a pass. positions [axis, slot] covers every slot its rows may have."""

    table: SlotTable
    positions: Tensor
    entries: dict[int, Entry]
    stay: dict[int, Callable[[list[int]], list[int]]] = field(default_factory=dict)
    """Layer → of the rows computed so far, those that go on through this layer and the ones above."""
    link: Callable[[int], None] | None = None
    """Called in front of each layer: puts stored rows of that layer into the table."""
    deep: Deep | None = None
    capture: Capture | None = None
    decodes: bool = False
    """One row, behind everything the sequence holds: it may be computed together with its neighbours'."""
    states: dict[int, Tensor | None] = field(default_factory=dict)
    """Boundary states asked for (layer → None); the decoder replaces None by the states [row, width] entering it."""
