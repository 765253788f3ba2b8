"""Puts stored rows into a sequence's table: patched, keys rotated once, values copied.

Layer by layer, right before a pass computes the layer; or on a GPU all layers at once by one kernel for the keys and
one for the values (`fused.py`), which must come to the same. It knows rows, patches and phases, not whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Patch
from looseleaf.link import fused
from looseleaf.model.rotary import Phase, RotaryForm, rotate
from looseleaf.patch.form import put_on


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Rows of a chunk and where they go."""

    slots: slice
    rows: KVRows
    """Keys un-rotated."""
    patch: Patch | None


def binder(table: KVRows, bound: Sequence[Bound], phase: Phase, form: RotaryForm) -> Callable[[int], None]:
    """A function that binds a layer. phase: of all chunks' tokens, one chunk behind the other."""
    if fused.can_bind(table, bound):

        def bind_all(layer: int) -> None:
            if layer == 0:
                fused.bind(table, bound, phase, form)

        return bind_all
    return _by_layer(table, bound, phase, form)


def _by_layer(table: KVRows, bound: Sequence[Bound], phase: Phase, form: RotaryForm) -> Callable[[int], None]:
    rooms: dict[torch.Size, Tensor] = {}

    def bind(layer: int) -> None:
        keys, values = table.keys[layer], table.values[layer]
        at = 0
        for one in bound:
            own_keys, own_values = one.rows.keys[layer], one.rows.values[layer]
            patch = one.patch
            added = (patch.keys[layer], patch.values[layer]) if patch is not None else (None, None)
            if added[0] is not None:
                if own_keys.shape not in rooms:
                    rooms[own_keys.shape] = torch.empty_like(own_keys)
                own_keys = put_on(added[0], own_keys, out=rooms[own_keys.shape])
            rotate(own_keys, phase[at : at + one.rows.tokens], form, out=keys[:, one.slots])
            if added[1] is not None:
                put_on(added[1], own_values, out=values[:, one.slots])
            else:
                values[:, one.slots].copy_(own_values)
            at += one.rows.tokens

    return bind
