"""Forming patches: the deficit's largest directions, layer by layer.

Bytes are counted as a share of the page's: m directions of n tokens and width D take m(n + D) of nD numbers, so
policies and figures speak of shares, not of ranks. Knows tensors; not how conditioned rows came about, nor where a
patch is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Factors, Patch
from looseleaf.patch.deficit import Deficit, find_deficit

SPARE, ROUNDS = 8, 2
"""Directions a randomised decomposition looks for beyond those kept, and its power iterations."""
FIRST = 1
"""Layers that have a deficit start here."""
WORTH = 4
"""It is used where a matrix is this many times as wide as the directions looked for."""


def rank_within(share: float, tokens: int, width: int) -> int:
    """Most directions whose factors take at most `share` of the bytes of [token, width]; at least one.

    All of them for a share of 1: who wants everything restored does not ask for the price.
    """
    if share >= 1:
        return min(tokens, width)
    return max(1, int(share * tokens * width / (tokens + width) + 1e-9))


def factor(matrix: Tensor, rank: int) -> Factors:
    """The best [token, width] matrix of at most that rank, as factors: its largest singular directions, in order.

    All of them by LAPACK; few by a randomised decomposition; some by the eigenvectors of the smaller of the two
    products with itself, which takes a third of LAPACK's time and is as good wherever something is cut off.
    """
    matrix, rank = matrix.float(), min(rank, *matrix.shape)
    tokens, width = matrix.shape
    if rank == min(tokens, width):
        left, sizes, right_t = torch.linalg.svd(matrix, full_matrices=False)
        return Factors(left=left * sizes, right=right_t.mT.contiguous())
    if WORTH * (rank + SPARE) <= min(tokens, width):
        return _few(matrix, rank)
    if width <= tokens:
        right = _directions(matrix.mT @ matrix, rank)
        return Factors(left=matrix @ right, right=right)
    left = _directions(matrix @ matrix.mT, rank)
    right = matrix.mT @ left
    sizes = right.norm(dim=0).clamp_min(1e-30)
    return Factors(left=left * sizes, right=right / sizes)


def _directions(square: Tensor, rank: int) -> Tensor:
    """The largest eigenvectors [row, rank] of a matrix times itself."""
    try:
        found = torch.linalg.eigh(square).eigenvectors
    except RuntimeError:  # in single precision it now and then does not converge on many equal eigenvalues
        found = torch.linalg.eigh(square.double()).eigenvectors.float()
    return found.flip(1)[:, :rank].contiguous()


def _few(matrix: Tensor, rank: int) -> Factors:
    """Subspace iteration from random directions, the same ones every time: equal deficits give equal patches."""
    chance = torch.Generator().manual_seed(0)
    probe = torch.randn(matrix.shape[1], rank + SPARE, generator=chance).to(matrix.device)
    base = torch.linalg.qr(matrix @ probe).Q
    for _ in range(ROUNDS):
        base = torch.linalg.qr(matrix @ (matrix.mT @ base)).Q
    left, sizes, right_t = torch.linalg.svd(base.mT @ matrix, full_matrices=False)
    return Factors(left=(base @ (left * sizes))[:, :rank].contiguous(), right=right_t.mT[:, :rank].contiguous())


def form_patch(conditioned: KVRows, alone: KVRows, *, share: float, from_layer: int = 0) -> Patch:
    """A patch that takes the rows of a chunk computed alone to those computed in context.

    `share`: of the page's bytes, in every layer that is patched; 1 keeps every direction. Layers before `from_layer`
    are left as they are stored, and the first in any case: its rows come from a token and nothing in front of it.
    """
    return patch_of(find_deficit(conditioned, alone), conditioned, share=share, from_layer=from_layer)


def patch_of(deficit: Deficit, like: KVRows, *, share: float, from_layer: int = 0) -> Patch:
    """A deficit's largest directions, in the dtype and on the device of `like`."""

    def cut(delta: Tensor) -> Factors:
        found = factor(delta, rank_within(share, *delta.shape))
        dtype = like.layout.dtype
        return Factors(left=found.left.to(dtype), right=found.right.to(dtype))

    keys, values = (
        tuple(cut(one) if layer >= max(FIRST, from_layer) else None for layer, one in enumerate(planes))
        for planes in (deficit.keys, deficit.values)
    )
    return Patch(keys=keys, values=values)


def cut(patch: Patch, *, share: float, from_layer: int = 0) -> Patch:
    """The largest of a patch's directions that take at most `share` of the page's bytes."""

    def fewer(layer: int, one: Factors | None) -> Factors | None:
        if one is None or layer < from_layer:
            return None
        rank = min(one.rank, rank_within(share, len(one.left), len(one.right)))
        return Factors(left=one.left[:, :rank], right=one.right[:, :rank], shared=one.shared)

    keys, values = (
        tuple(fewer(layer, one) for layer, one in enumerate(planes)) for planes in (patch.keys, patch.values)
    )
    return Patch(keys=keys, values=values)


def put_on(factors: Factors, plane: Tensor, out: Tensor | None = None) -> Tensor:
    """A layer's stored keys or values [head, token, dim] with a patch put on: one product of rank m."""
    heads, _, dim = plane.shape
    left, right = factors.left.expand(heads, -1, -1), factors.right.view(heads, dim, factors.rank)
    if out is None:
        return torch.baddbmm(plane, left, right.mT)
    return out.copy_(plane).baddbmm_(left, right.mT)
