"""Puts stored rows into a sequence's table: patched, keys rotated once, values copied.

Layer by layer, right before a pass computes the layer; or on a GPU all layers at once by one kernel for the keys and
one for the values (`fused.py`), which must come to the same. It knows rows, patches and phases, not whose they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.link import fused
from looseleaf.link.bound import Bound
from looseleaf.model.rotary import Phase, RotaryForm, rotate
from looseleaf.patch.form import put_on

log = logging.getLogger(__name__)


def binder(table: KVRows, bound: Sequence[Bound], phase: Phase, form: RotaryForm) -> Callable[[int], None]:
    """A function that binds a layer. phase: of all chunks' tokens, one chunk behind the other."""
    by_layer = _by_layer(table, bound, phase, form)
    if not fused.can_bind(table, bound):
        return by_layer
    done = False

    def bind(layer: int) -> None:
        nonlocal done
        if layer == 0 and not fused.broken:
            try:
                fused.bind(table, bound, phase, form)
                done = True
            except Exception:  # no compiler on this machine, a GPU with too little of something
                log.exception("rows are bound layer by layer from now on: the kernel that binds all could not run")
                fused.broken = True
        if not done:
            by_layer(layer)

    return bind


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
