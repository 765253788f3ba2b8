"""The deficit: a chunk's KV computed in context less the one computed alone, keys un-rotated (Kamera §2).

Plain functions over KV rows. What is done with a deficit, to factor it or to look at it, is others' business.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from looseleaf.kv.layout import KVRows


@dataclass(frozen=True, kw_only=True)
class Deficit:
    """By layer, heads side by side: keys and values [token, width] in fp32, keys un-rotated."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    key_energy: tuple[Tensor, ...]
    """Of the conditioned keys it is a part of: the sum of their squares."""
    value_energy: tuple[Tensor, ...]


def find_deficit(conditioned: KVRows, alone: KVRows) -> Deficit:
    """Rows computed in context less rows computed alone, both with un-rotated keys."""
    keys, values = ([wide(one) for one in planes] for planes in (conditioned.keys, conditioned.values))
    return Deficit(
        keys=tuple(one - wide(other) for one, other in zip(keys, alone.keys, strict=True)),
        values=tuple(one - wide(other) for one, other in zip(values, alone.values, strict=True)),
        key_energy=tuple(one.square().sum() for one in keys),
        value_energy=tuple(one.square().sum() for one in values),
    )


def wide(plane: Tensor) -> Tensor:
    """[head, token, dim] → [token, head · dim] in fp32."""
    return plane.float().transpose(0, 1).flatten(1)
