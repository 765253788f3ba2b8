"""Binding on a GPU: stored rows are read, patched, turned and written by one kernel for all layers, heads and chunks.

Layer by layer a link is some ten launches a chunk and layer, and a small model's link is nothing but launches. Here the
kernel finds the planes by their addresses, so that rows may lie anywhere. It repeats `rotate` operation by operation,
rounding where it rounds: keys without a patch come out the same to the last bit. Triton comes with torch for CUDA;
without it `bind.py` goes layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Factors
from looseleaf.model.rotary import PairOrder, Phase, RotaryForm

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if TYPE_CHECKING:
    from looseleaf.link.bind import Bound

BLOCK = 64
"""Tokens a program binds."""
FIELDS = 6
"""Numbers that describe a chunk to the kernel: tokens, first slot, first row of the phase, its head stride, and the
row strides of a patch's left and right factors."""


def can_bind(table: KVRows, bound: Sequence[Bound]) -> bool:
    """Whether the kernel can: on a GPU, every layer of one shape, rows and factors dense along their last axis."""
    if triton is None or not table.keys[0].is_cuda:
        return False
    return is_regular(table, bound)


def is_regular(table: KVRows, bound: Sequence[Bound]) -> bool:
    """Whether planes and factors are alike in all layers, and rows follow one another."""
    layers = table.layout.layers
    if table.layout.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if any(layer != layers[0] for layer in layers[1:]):
        return False
    for one in bound:
        for planes in (one.rows.keys, one.rows.values):
            if any(plane.stride() != planes[0].stride() or plane.device != table.device for plane in planes):
                return False
            if planes[0].stride(2) != 1 or planes[0].stride(1) != planes[0].shape[2]:
                return False
        for factors in (one.patch.keys, one.patch.values) if one.patch is not None else ():
            kept = [factor for factor in factors if factor is not None]
            if any(_strides(factor) != _strides(kept[0]) or factor.rank != kept[0].rank for factor in kept):
                return False
            if any(factor.left.stride(1) != 1 or factor.right.stride(1) != 1 for factor in kept):
                return False
    return True


def bind(table: KVRows, bound: Sequence[Bound], phase: Phase, form: RotaryForm) -> None:
    """Every layer of every chunk into the table."""
    _bind_planes(table, bound, 0, phase, form)
    _bind_planes(table, bound, 1, None, form)


def _bind_planes(table: KVRows, bound: Sequence[Bound], which: int, phase: Phase | None, form: RotaryForm) -> None:
    """Keys (`which` 0), which turn, or values."""
    device, layout = table.device, table.layout
    plane = layout.layers[0].values if which else layout.layers[0].keys
    target = (table.values if which else table.keys)[0]
    fields: list[list[int]] = []
    ranks: list[int] = []
    at = 0
    for one in bound:
        factors = () if one.patch is None else one.patch.values if which else one.patch.keys
        kept = next((factor for factor in factors if factor is not None), None)
        source = (one.rows.values if which else one.rows.keys)[0]
        fields.append([one.rows.tokens, one.slots.start, at, source.stride(0), *_strides(kept)])
        ranks.append(kept.rank if kept is not None else 0)
        at += one.rows.tokens
    bare = torch.zeros(2, len(layout.layers), dtype=torch.int64, device=device)
    rows = torch.stack([one.rows.addresses[which] for one in bound])
    patches = torch.stack([bare if one.patch is None else one.patch.addresses[which] for one in bound])
    about = torch.tensor([[*line, rank] for line, rank in zip(fields, ranks, strict=True)], device=device)
    cos, sin = (phase.cos.contiguous(), phase.sin.contiguous()) if phase is not None else (target, target)
    turned = form.dim if phase is not None else 0
    longest = max(line[0] for line in fields)
    grid = (len(bound) * len(layout.layers) * plane.heads, triton.cdiv(longest, BLOCK))
    _bind_kernel[grid](
        rows, table.addresses[which], patches, about,
        target, cos, sin, len(layout.layers), target.stride(0),
        HEADS=plane.heads, DIM=plane.dim, TURNED=turned, PAIRS=_wide(turned // 2),
        REST=_wide(plane.dim - turned), RANK=_wide(max(ranks)) if max(ranks) else 0, ABOUT=FIELDS + 1,
        INTERLEAVED=form.order is not PairOrder.HALVES, IN_PLACE=form.order is PairOrder.PAIRS, BLOCK=BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip


def _strides(factors: Factors | None) -> tuple[int, int]:
    return (0, 0) if factors is None else (factors.left.stride(0), factors.right.stride(0))


def _wide(count: int) -> int:
    """A power of two that holds so many, at least what a product of tiles takes; 0 for nothing."""
    return max(16, 1 << (count - 1).bit_length()) if count else 0


def _jit(function: Any) -> Any:
    return triton.jit(function) if triton is not None else function


@_jit
def _patched(  # type: ignore[no-untyped-def]
    rows, left, right, left_stride, right_stride, rank, token, kept, column, inside, RANK: tl.constexpr
):
    """Rows of a tile with the patch put on: fp32 sums, rounded once."""
    direction = tl.arange(0, RANK)
    known = direction < rank
    lefts = tl.load(
        left + token[:, None] * left_stride + direction[None, :], mask=kept[:, None] & known[None, :], other=0.0
    )
    rights = tl.load(
        right + column[None, :] * right_stride + direction[:, None], mask=inside[None, :] & known[:, None], other=0.0
    )
    return (rows.to(tl.float32) + tl.dot(lefts, rights, input_precision="ieee")).to(rows.dtype)


@_jit
def _bind_kernel(  # type: ignore[no-untyped-def]
    rows, table, patches, about, like, cosines, sines, layers, table_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    TURNED: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, RANK: tl.constexpr, ABOUT: tl.constexpr,
    INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one layer of one chunk, some tokens."""
    number = tl.program_id(0)
    head = number % HEADS
    layer = (number // HEADS) % layers
    chunk = number // (HEADS * layers)
    line = about + chunk * ABOUT
    tokens, slot, turn, stride = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    left_stride, right_stride, rank = tl.load(line + 4), tl.load(line + 5), tl.load(line + 6)
    kind = like.dtype
    source = tl.load(rows + chunk * layers + layer).to(kind) + head * stride
    target = tl.load(table + layer).to(kind) + head * table_stride + slot * DIM
    left_at = tl.load(patches + chunk * 2 * layers + layer)
    left = left_at.to(kind)
    right = tl.load(patches + (chunk * 2 + 1) * layers + layer).to(kind) + head * DIM * right_stride
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = token < tokens
    start = token[:, None] * DIM
    if TURNED > 0:
        HALF: tl.constexpr = TURNED // 2
        pair = tl.arange(0, PAIRS)
        inside = pair < HALF
        tile = kept[:, None] & inside[None, :]
        one, two = pair, pair + HALF
        if INTERLEAVED:
            one, two = 2 * pair, 2 * pair + 1
        first = tl.load(source + start + one[None, :], mask=tile, other=0.0)
        second = tl.load(source + start + two[None, :], mask=tile, other=0.0)
        if RANK > 0:  # noqa: SIM102  (known when compiled, the next is not)
            if left_at != 0:
                first = _patched(first, left, right, left_stride, right_stride, rank, token, kept, one, inside, RANK)
                second = _patched(second, left, right, left_stride, right_stride, rank, token, kept, two, inside, RANK)
        place = (turn + token)[:, None] * HALF + pair[None, :]
        cos, sin = tl.load(cosines + place, mask=tile, other=0.0), tl.load(sines + place, mask=tile, other=0.0)
        # each product is rounded as torch rounds it before the sum is
        rounded = cos.dtype
        new_first = _times(first, cos, rounded).to(tl.float32) - _times(second, sin, rounded).to(tl.float32)
        new_second = _times(second, cos, rounded).to(tl.float32) + _times(first, sin, rounded).to(tl.float32)
        goes, goes_too = pair, pair + HALF
        if IN_PLACE:
            goes, goes_too = one, two
        tl.store(target + start + goes[None, :], new_first.to(first.dtype), mask=tile)
        tl.store(target + start + goes_too[None, :], new_second.to(first.dtype), mask=tile)
    if REST > 0:
        column = TURNED + tl.arange(0, REST)
        inside = column < DIM
        tile = kept[:, None] & inside[None, :]
        other = tl.load(source + start + column[None, :], mask=tile, other=0.0)
        if RANK > 0:  # noqa: SIM102  (known when compiled, the next is not)
            if left_at != 0:
                other = _patched(other, left, right, left_stride, right_stride, rank, token, kept, column, inside, RANK)
        tl.store(target + start + column[None, :], other, mask=tile)


@_jit
def _times(one, other, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product in fp32, rounded."""
    return (one.to(tl.float32) * other.to(tl.float32)).to(dtype)
