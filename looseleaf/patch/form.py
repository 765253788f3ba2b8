"""Forming patches: the deficit's largest directions, layer by layer.

Bytes are counted as a share of the page's: m directions of n tokens and width D take m(n + D) of nD numbers, so
policies and figures speak of shares, not of ranks. Knows tensors; not how conditioned rows came about, nor where a
patch is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

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
HOST, HOST_BYTES = 512, 2**26
"""Matrices on a GPU whose smaller side is at most this, and that have no more bytes together, are decomposed on the
host: a GPU's solvers take small ones one after the other, each with a wait."""


def rank_within(share: float, tokens: int, width: int) -> int:
    """Most directions whose factors take at most `share` of the bytes of [token, width]; at least one.

    All of them for a share of 1: who wants everything restored does not ask for the price.
    """
    if share >= 1:
        return min(tokens, width)
    return max(1, int(share * tokens * width / (tokens + width) + 1e-9))


def factor(matrix: Tensor, rank: int) -> Factors:
    """The best [token, width] matrix of at most that rank, as factors: its largest singular directions, in order."""
    return factor_all([matrix], [rank])[0]


def factor_all(matrices: Sequence[Tensor], ranks: Sequence[int]) -> list[Factors]:
    """Each matrix as `factor` has it; equal shapes are done together."""
    alike: dict[tuple[torch.Size, int], list[int]] = {}
    for at, (matrix, rank) in enumerate(zip(matrices, ranks, strict=True)):
        alike.setdefault((matrix.shape, min(rank, *matrix.shape)), []).append(at)
    found: dict[int, Factors] = {}
    for ((tokens, width), rank), places in alike.items():
        stack = torch.stack([matrices[at].float() for at in places])
        size = torch.linalg.matrix_norm(stack)[:, None, None].clamp_min(1e-30)
        if not size.isfinite().all():
            raise ValueError("a matrix that is not finite has no factors")
        stack /= size  # a deficit of mere rounding, squared, would leave what single precision can tell apart
        smaller = min(tokens, width)
        work = stack.cpu() if smaller <= HOST and stack.nbytes <= HOST_BYTES else stack
        left, right = _few(work, rank) if WORTH * (rank + SPARE) <= smaller else _largest(work, rank)
        left, right = left.to(stack.device) * size, right.to(stack.device)
        found |= {at: Factors(left=left[number], right=right[number]) for number, at in enumerate(places)}
    return [found[at] for at in range(len(matrices))]


def _largest(stack: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left [.., token, rank] and right [.., width, rank] by the eigenvectors of the smaller product with itself.

    A third of the time of a singular value decomposition. All directions together restore a matrix to rounding, since
    they are orthonormal on that side whatever their sizes.
    """
    tokens, width = stack.shape[-2:]
    if width <= tokens:
        right = _directions(stack.mT @ stack, rank)
        return stack @ right, right
    left = _directions(stack @ stack.mT, rank)
    right = stack.mT @ left
    sizes = right.norm(dim=-2, keepdim=True).clamp_min(1e-30)
    return left * sizes, right / sizes


def _directions(square: Tensor, rank: int) -> Tensor:
    """The largest eigenvectors [.., row, rank] of matrices times themselves.

    In single precision it now and then does not converge on many equal eigenvalues, and does not always say so.
    """
    try:
        found = torch.linalg.eigh(square).eigenvectors
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        found = square.new_full((), torch.nan)
    if not found.isfinite().all():
        found = torch.linalg.eigh(square.double()).eigenvectors.float()
    return found.flip(-1)[..., :rank].contiguous()


def _few(stack: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Subspace iteration from random directions, the same ones every time: equal deficits give equal patches."""
    chance = torch.Generator().manual_seed(0)
    probe = torch.randn(stack.shape[-1], rank + SPARE, generator=chance).to(stack.device)
    base = torch.linalg.qr(stack @ probe).Q
    for _ in range(ROUNDS):
        base = torch.linalg.qr(stack @ (stack.mT @ base)).Q
    left, right = _largest(base.mT @ stack, rank)
    return base @ left, right


def form_patch(conditioned: KVRows, alone: KVRows, *, share: float, from_layer: int = 0) -> Patch:
    """A patch that takes the rows of a chunk computed alone to those computed in context.

    `share`: of the page's bytes, in every layer that is patched; 1 keeps every direction. Layers before `from_layer`
    are left as they are stored, and the first in any case: its rows come from a token and nothing in front of it.
    """
    return patch_of(find_deficit(conditioned, alone), conditioned, share=share, from_layer=from_layer)


def patch_of(deficit: Deficit, like: KVRows, *, share: float, from_layer: int = 0) -> Patch:
    """A deficit's largest directions, in the dtype and on the device of `like`."""
    first, dtype = max(FIRST, from_layer), like.layout.dtype
    deltas = (*deficit.keys[first:], *deficit.values[first:])
    found = [
        Factors(left=one.left.to(dtype), right=one.right.to(dtype))
        for one in factor_all(deltas, [rank_within(share, *delta.shape) for delta in deltas])
    ]
    bare, layers = (None,) * min(first, len(deficit.keys)), len(found) // 2
    return Patch(keys=(*bare, *found[:layers]), values=(*bare, *found[layers:]))


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
