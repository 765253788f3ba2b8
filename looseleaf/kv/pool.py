"""Memory for sequences' tables: slabs with a few seats, kept when a sequence ends and handed to the next.

Two reasons. Fresh memory is slow the first time it is touched: linking 1,032 tokens into a new 47 MB table took 2.5
times as long as into a used one. And sequences that sit in one slab can decode together: one write and one attention
call a layer for all of them (`kv/attention.py`), where eight separate tables took eight.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.kv.layout import KVLayout, KVRows

GRAIN = 256
"""Tokens are rounded up to this, so that a seat fits many sequences."""
SEATS = 8
"""Seats of a slab, fewer where `SLAB_BYTES` would be passed."""
SLAB_BYTES = 512 * 2**20


class Slab:
    """Tables of equal capacity side by side. keys[layer], values[layer]: [seat, head, token, dim]."""

    def __init__(self, layout: KVLayout, capacity: int, seats: int, device: torch.device):
        self.layout = layout
        self.capacity = capacity
        self.free = list(range(seats))[::-1]
        self.seats = seats
        self._rows: dict[int, KVRows] = {}

        def empty(heads: int, dim: int) -> Tensor:
            return torch.empty(seats, heads, capacity, dim, dtype=layout.dtype, device=device)

        self.keys = [empty(layer.keys.heads, layer.keys.dim) for layer in layout.layers]
        self.values = [empty(layer.values.heads, layer.values.dim) for layer in layout.layers]

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.seats * self.capacity * self.layout.row_bytes

    def rows(self, seat: int) -> KVRows:
        """One seat's rows, as views; what was in them is garbage."""
        if seat not in self._rows:  # making views of every plane takes longer than looking one up
            planes = ([one[seat] for one in each] for each in (self.keys, self.values))
            self._rows[seat] = KVRows.of_views(self.layout, *planes)
        return self._rows[seat]


@dataclass(frozen=True, slots=True)
class Seat:
    """A place in a slab."""

    slab: Slab
    number: int


class SlabPool:
    """Slabs of one layout. Idle ones are kept up to `idle_bytes`."""

    def __init__(self, layout: KVLayout, device: torch.device, *, idle_bytes: int):
        self.layout = layout
        self.device = device
        self.idle_bytes = idle_bytes
        self._slabs: list[Slab] = []
        self._lock = threading.Lock()

    def take(self, tokens: int) -> Seat:
        """A seat with room for `tokens`, to be given back."""
        capacity = -(-tokens // GRAIN) * GRAIN
        with self._lock:
            for slab in self._slabs:
                if slab.capacity == capacity and slab.free:
                    return Seat(slab, slab.free.pop())
            seats = max(1, min(SEATS, SLAB_BYTES // (capacity * self.layout.row_bytes)))
            slab = Slab(self.layout, capacity, seats, self.device)
            self._slabs.append(slab)
            return Seat(slab, slab.free.pop())

    def give_back(self, seat: Seat) -> None:
        """Free a seat nobody reads any more; slabs that lie idle beyond the budget go."""
        with self._lock:
            seat.slab.free.append(seat.number)
            seat.slab.free.sort(reverse=True)
            idle = [slab for slab in self._slabs if len(slab.free) == slab.seats]
            spare = sum(slab.nbytes for slab in idle) - self.idle_bytes
            for slab in idle:
                if spare <= 0:
                    break
                self._slabs.remove(slab)
                spare -= slab.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes reserved by all slabs."""
        return sum(slab.nbytes for slab in self._slabs)
