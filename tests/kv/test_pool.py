"""Slabs: seats are handed out once, come back, and idle memory stays within its budget."""

from __future__ import annotations

import torch

from looseleaf.kv.layout import KVLayout, LayerLayout, Plane
from looseleaf.kv.pool import GRAIN, SEATS, SlabPool

LAYOUT = KVLayout(layers=(LayerLayout(keys=Plane(heads=1, dim=4), values=Plane(heads=1, dim=4)),), dtype=torch.float32)


def test_a_seat_is_never_handed_out_twice() -> None:
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=2**30)
    seats = [pool.take(10) for _ in range(3 * SEATS)]
    assert len({(id(seat.slab), seat.number) for seat in seats}) == len(seats)
    pool.give_back(seats[5])
    again = pool.take(10)
    assert (again.slab, again.number) == (seats[5].slab, seats[5].number)


def test_capacities_are_rounded_so_that_seats_fit_many_sequences() -> None:
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=2**30)
    first, second, longer = pool.take(1), pool.take(GRAIN), pool.take(GRAIN + 1)
    assert first.slab is second.slab
    assert longer.slab is not first.slab
    assert longer.slab.rows(longer.number).tokens == 2 * GRAIN


def test_idle_slabs_beyond_the_budget_are_let_go() -> None:
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=0)
    seats = [pool.take(10) for _ in range(SEATS + 1)]
    held = pool.nbytes
    for seat in seats[:SEATS]:
        pool.give_back(seat)
    assert pool.nbytes == held // 2


def test_rows_of_neighbouring_seats_do_not_overlap() -> None:
    pool = SlabPool(LAYOUT, torch.device("cpu"), idle_bytes=0)
    one, other = (seat.slab.rows(seat.number) for seat in (pool.take(20), pool.take(20)))
    one.keys[0].fill_(1.0)
    other.keys[0].fill_(2.0)
    assert (one.keys[0] == 1).all()
