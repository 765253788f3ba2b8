"""A sequence's own rows: one slot per token of its prompt and answer.

Knows slots, and which of them are exact; does not know where rows came from. Callers write rows and ask for what a
query may read; only `kv/attention.py` reads them, so that spans read in place or a paged pool can come later without
touching anything else.
"""

from __future__ import annotations

from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.pool import Seat

CLEARED_AHEAD = 64
"""Slots cleared beyond what is asked for, so that a growing neighbour asks rarely."""


class SlotTable:
    """Keys (rotated) and values of a sequence, slot = index in the sequence; capacity is fixed at birth.

    Every slot is exact or approximate. A row is approximate when it was reused outside the context it was computed in,
    or attended such a row. Attention is causal, so all rows behind an approximate one are approximate too and one
    number says it for every range.
    """

    def __init__(self, rows: KVRows, seat: Seat | None = None):
        self.rows = rows
        self.seat = seat
        """Where the rows lie, when that is a slab: sequences of one slab decode together."""
        self.exact_tokens = rows.tokens
        """Slots before this one are exact, all others approximate."""
        self._cleared_to = 0

    def taint_from(self, slot: int) -> None:
        """Mark `slot` and everything behind it as approximate: what follows has attended it."""
        self.exact_tokens = min(self.exact_tokens, slot)

    def write(self, layer: int, slots: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        """Put rows computed for `layer` into their slots. keys, values [head, row, dim]."""
        if isinstance(slots, slice):
            self.rows.keys[layer][:, slots].copy_(keys)
            self.rows.values[layer][:, slots].copy_(values)
        else:
            self.rows.keys[layer].index_copy_(1, slots, keys)
            self.rows.values[layer].index_copy_(1, slots, values)

    def read(self, layer: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the slots before `stop`, [head, slot, dim], without a copy."""
        return self.rows.keys[layer][:, :stop], self.rows.values[layer][:, :stop]

    def clear(self, start: int, stop: int) -> None:
        """Make slots `start:stop` of the seat, which hold nothing yet, safe to be read and masked away.

        Memory is handed on as it is: a masked NaN in it would still be a NaN in the sum.
        """
        if stop <= self._cleared_to:
            return
        assert self.seat is not None
        start, stop = max(start, self._cleared_to), stop + CLEARED_AHEAD
        for plane in (*self.seat.slab.keys, *self.seat.slab.values):
            plane[self.seat.number, :, start:stop].zero_()
        self._cleared_to = stop

    def copy_out(self, slots: range) -> KVRows:
        """A copy of these rows in every layer."""
        return self.rows.part(slots.start, slots.stop).copy()
