"""A shared basis: directions one model's deficits have in common, learned once from the operator's data.

With it a patch is coefficients alone, so that the same bytes keep more directions. The basis is no secret of anybody's:
it may be learned from items the operator may read, and from no tenant's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Factors, Patch
from looseleaf.patch.deficit import Deficit
from looseleaf.patch.form import FIRST


@dataclass(frozen=True, kw_only=True)
class Basis:
    """By layer: orthonormal directions [width, width] of keys and of values, the most useful first."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held, once for all patches."""
        return sum(one.nbytes for one in (*self.keys, *self.values))


def learn_basis(deficits: Iterable[Deficit]) -> Basis:
    """Directions that carry most of these deficits, each item's layers counting alike."""
    sums: list[Tensor] = []
    layers = 0
    for one in deficits:
        planes = (*one.keys, *one.values)
        layers = len(one.keys)
        sums = sums or [plane.new_zeros(plane.shape[1], plane.shape[1]) for plane in planes]
        for total, plane in zip(sums, planes, strict=True):
            total += plane.mT @ plane / plane.square().sum().clamp_min(1e-30)
    if not sums:
        raise ValueError("a basis is learned from at least one deficit")
    found = tuple(torch.linalg.eigh(total.double()).eigenvectors.flip(1).float() for total in sums)
    return Basis(keys=found[:layers], values=found[layers:])


def patch_in(basis: Basis, deficit: Deficit, like: KVRows, *, share: float, from_layer: int = 0) -> Patch:
    """A deficit's coefficients in the basis, as many as take `share` of the page's bytes."""
    dtype = like.layout.dtype

    def cut(layer: int, delta: Tensor, directions: Tensor) -> Factors | None:
        if layer < max(FIRST, from_layer):
            return None
        rank = max(1, min(delta.shape[1], int(share * delta.shape[1] + 1e-9)))
        kept = directions[:, :rank].to(delta.device)
        return Factors(left=(delta @ kept).to(dtype), right=kept.to(dtype), shared=True)

    keys, values = (
        tuple(cut(layer, *pair) for layer, pair in enumerate(zip(deltas, directions, strict=True)))
        for deltas, directions in ((deficit.keys, basis.keys), (deficit.values, basis.values))
    )
    return Patch(keys=keys, values=values)
