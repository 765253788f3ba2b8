"""Orbit patches: one patch for a set of predecessors in whatever order (Kamera §5).

The mean of a chunk's deficits behind several orders of the same predecessors, kept as factors all along: two patches
are averaged in the directions they have, and cut again. Nothing larger than a patch is ever held.
"""

from __future__ import annotations

import torch

from looseleaf.kv.records import Factors, Patch
from looseleaf.patch.form import factor


def merge(one: Patch, weight: float, other: Patch, other_weight: float) -> Patch:
    """The weighted mean of two patches of one chunk, in as many directions as the first has."""
    total = weight + other_weight
    keys, values = (
        tuple(_mean(a, weight / total, b, other_weight / total) for a, b in zip(first, second, strict=True))
        for first, second in ((one.keys, other.keys), (one.values, other.values))
    )
    return Patch(keys=keys, values=values)


def _mean(one: Factors | None, share: float, other: Factors | None, other_share: float) -> Factors | None:
    if one is None or other is None:
        return None
    left = torch.cat((share * one.left.float(), other_share * other.left.float()), dim=1)
    right = torch.cat((one.right.float(), other.right.float()), dim=1)
    # left @ right.T without making it: the product of two small triangles has its singular values
    left_base, left_part = torch.linalg.qr(left)
    right_base, right_part = torch.linalg.qr(right)
    core = factor(left_part @ right_part.mT, one.rank)
    dtype = one.left.dtype
    return Factors(left=(left_base @ core.left).to(dtype), right=(right_base @ core.right).to(dtype))
