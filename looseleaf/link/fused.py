"""Binding on a GPU: stored rows are read, patched, turned and written by one kernel for all layers, heads and chunks.

Layer by layer a link is some ten launches a chunk and layer, and a small model's link is nothing but launches. Here the
kernel finds the planes by their addresses, so that rows may lie anywhere. It repeats `rotate` operation by operation,
rounding where it rounds: keys without a patch come out the same to the last bit. Triton comes with torch for CUDA;
without it `bind.py` goes layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Factors
from looseleaf.link.bound import Bound
from looseleaf.model.rotary import PairOrder, Phase, RotaryForm

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

broken = False
"""Whether a launch failed: nobody tries again."""

BLOCK, WIDEST, STEP = 64, 64, 32
"""Tokens a program binds, numbers of a row at most, and directions of a patch it adds at a time."""
FIELDS = 7
"""Numbers that describe a chunk to the kernel: tokens, first slot, first row of the phase, its head stride, the row
strides of a patch's left and right factors, and its rank. By layer behind them: where its rows begin, and the left and
right factors."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_bind(table: KVRows, bound: Sequence[Bound]) -> bool:
    """Whether the kernel can: on a GPU, and layers lie alike."""
    return triton is not None and not broken and table.keys[0].is_cuda and is_regular(table, bound)


def is_regular(table: KVRows, bound: Sequence[Bound]) -> bool:
    """Whether planes and factors are alike in all layers, and where the table is."""
    if not table.alike or table.layout.dtype not in DTYPES:
        return False
    if not all(one.rows.alike and (one.patch is None or one.patch.alike) for one in bound):
        return False
    lying = [plane for one in bound for plane in (one.rows.keys[0], one.rows.values[0])]
    patches = [one.patch for one in bound if one.patch is not None]
    lying += [side.left for patch in patches for side in (*patch.keys, *patch.values) if side is not None]
    return all((one.dtype, one.device) == (table.layout.dtype, table.device) for one in lying)


def bind(table: KVRows, bound: Sequence[Bound], phase: Phase, form: RotaryForm) -> None:
    """Every layer of every chunk into the table."""
    lines = [_lines(table, bound, which) for which in (0, 1)]
    sent = torch.from_numpy(np.concatenate(lines)).to(table.device, non_blocking=True)
    keys, values = sent[: lines[0].size], sent[lines[0].size :]
    with torch.cuda.device(table.device) if table.keys[0].is_cuda else contextlib.nullcontext():
        _launch(table, bound, 0, keys, phase, form)
        _launch(table, bound, 1, values, None, form)


def _lines(table: KVRows, bound: Sequence[Bound], which: int) -> NDArray[np.int64]:
    """What the kernel is told about keys (`which` 0) or values: where the table's planes begin, then of every chunk."""
    layers = len(table.layout.layers)
    bare = np.zeros(2 * layers, dtype=np.int64)
    lines = [table.addresses[which]]
    at = 0
    for one in bound:
        factors = () if one.patch is None else one.patch.values if which else one.patch.keys
        kept = next((factor for factor in factors if factor is not None), None)
        source = (one.rows.values if which else one.rows.keys)[0]
        about = np.array([one.rows.tokens, one.slots.start, at, source.stride(0), *_about(kept)], dtype=np.int64)
        lines += [about, one.rows.addresses[which], bare if one.patch is None else one.patch.addresses[which].ravel()]
        at += one.rows.tokens
    if sum(line.size for line in lines) % 2:  # what follows begins at 16 bytes: a kernel is compiled by that
        lines.append(np.zeros(1, dtype=np.int64))
    return np.concatenate(lines)


def _launch(
    table: KVRows, bound: Sequence[Bound], which: int, lines: Tensor, phase: Phase | None, form: RotaryForm
) -> None:
    """Keys, which turn, or values."""
    plane = table.layout.layers[0].values if which else table.layout.layers[0].keys
    target = (table.values if which else table.keys)[0]
    cos, sin = (phase.cos.contiguous(), phase.sin.contiguous()) if phase is not None else (target, target)
    turned = form.dim if phase is not None else 0
    half, rest = turned // 2, plane.dim - turned
    tile = min(WIDEST, max(_wide(half), _wide(rest)))
    tiles = triton.cdiv(half, tile), triton.cdiv(rest, tile)
    even = plane.dim * table.layout.dtype.itemsize % 16 == 0
    layers, longest = len(table.layout.layers), max(one.rows.tokens for one in bound)
    grid = (len(bound) * layers * plane.heads, triton.cdiv(longest, BLOCK), sum(tiles))
    _bind_kernel[grid](
        lines, target, cos, sin, target.stride(0),
        LAYERS=layers, HEADS=plane.heads, DIM=plane.dim, HALF=half, TURN_TILES=tiles[0], TILE=tile, FIELDS=FIELDS,
        INTERLEAVED=form.order is not PairOrder.HALVES, IN_PLACE=form.order is PairOrder.PAIRS,
        ALIGNED=even and table.aligned and all(one.rows.aligned for one in bound), BLOCK=BLOCK, STEP=STEP,
        enable_fp_fusion=False,
    )  # fmt: skip


def _about(factors: Factors | None) -> tuple[int, int, int]:
    """Row strides of both sides, and the rank."""
    return (0, 0, 0) if factors is None else (factors.left.stride(0), factors.right.stride(0), factors.rank)


def _wide(count: int) -> int:
    """A power of two that holds so many, at least what a product of tiles takes; 0 for nothing."""
    return max(16, 1 << (count - 1).bit_length()) if count else 0


def _jit(function: Any) -> Any:
    return triton.jit(function) if triton is not None else function


@_jit
def _patched(  # type: ignore[no-untyped-def]
    rows, left, right, left_stride, right_stride, rank, token, kept, column, inside, BLOCK: tl.constexpr,
    TILE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Rows of a tile with the patch put on: fp32 sums, rounded once."""
    added = tl.zeros((BLOCK, TILE), dtype=tl.float32)
    first = 0
    while first < rank:
        direction = first + tl.arange(0, STEP)
        known = direction < rank
        lefts = tl.load(
            left + token[:, None] * left_stride + direction[None, :], mask=kept[:, None] & known[None, :], other=0.0
        )
        rights = tl.load(
            right + column[None, :] * right_stride + direction[:, None],
            mask=inside[None, :] & known[:, None], other=0.0,
        )  # fmt: skip
        added = tl.dot(lefts, rights, added, input_precision="ieee")
        first += STEP
    return (rows.to(tl.float32) + added).to(rows.dtype)


@_jit
def _times(one, other, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product, rounded."""
    return (one.to(tl.float32) * other.to(tl.float32)).to(dtype).to(tl.float32)


@_jit
def _bind_kernel(  # type: ignore[no-untyped-def]
    lines, like, cosines, sines, table_stride, LAYERS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, TURN_TILES: tl.constexpr, TILE: tl.constexpr, FIELDS: tl.constexpr,
    INTERLEAVED: tl.constexpr, IN_PLACE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One head of one layer of one chunk, some tokens, some numbers of each."""
    number = tl.program_id(0)
    head = (number % HEADS).to(tl.int64)
    layer = (number // HEADS) % LAYERS
    line = lines + LAYERS + number // (HEADS * LAYERS) * (FIELDS + 3 * LAYERS)
    addresses = line + FIELDS + layer
    tokens, slot, turn, stride = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    left_stride, right_stride = tl.load(line + 4), tl.load(line + 5)
    kind = like.dtype
    source = tl.load(addresses).to(kind) + head * stride
    target = tl.load(lines + layer).to(kind) + head * table_stride + slot * DIM
    if ALIGNED:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    left_at = tl.load(addresses + LAYERS)
    rank = tl.where(left_at == 0, 0, tl.load(line + 6)).to(tl.int32)
    left = left_at.to(kind)
    right = tl.load(addresses + 2 * LAYERS).to(kind) + head * DIM * right_stride
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = token < tokens
    start = token[:, None] * DIM
    part = tl.program_id(2)
    if part < TURN_TILES:
        pair = part * TILE + tl.arange(0, TILE)
        inside = pair < HALF
        tile = kept[:, None] & inside[None, :]
        one, two = pair, pair + HALF
        if INTERLEAVED:
            one, two = 2 * pair, 2 * pair + 1
        first = tl.load(source + start + one[None, :], mask=tile, other=0.0)
        second = tl.load(source + start + two[None, :], mask=tile, other=0.0)
        first = _patched(first, left, right, left_stride, right_stride, rank, token, kept, one, inside,
                         BLOCK, TILE, STEP)  # fmt: skip
        second = _patched(second, left, right, left_stride, right_stride, rank, token, kept, two, inside,
                          BLOCK, TILE, STEP)  # fmt: skip
        place = (turn + token)[:, None] * HALF + pair[None, :]
        cos, sin = tl.load(cosines + place, mask=tile, other=0.0), tl.load(sines + place, mask=tile, other=0.0)
        # torch writes the first product into the key, and rounds the second as its factors are
        if IN_PLACE:
            new_first = _times(first, cos, cos.dtype) - _times(second, sin, sin.dtype)
            new_second = _times(first, sin, sin.dtype) + _times(second, cos, cos.dtype)
            goes, goes_too = one, two
        else:
            new_first = _times(first, cos, first.dtype) - _times(second, sin, sin.dtype)
            new_second = _times(second, cos, second.dtype) + _times(first, sin, sin.dtype)
            goes, goes_too = pair, pair + HALF
        tl.store(target + start + goes[None, :], new_first.to(first.dtype), mask=tile)
        tl.store(target + start + goes_too[None, :], new_second.to(first.dtype), mask=tile)
    else:
        column = 2 * HALF + (part - TURN_TILES) * TILE + tl.arange(0, TILE)
        inside = column < DIM
        tile = kept[:, None] & inside[None, :]
        other = tl.load(source + start + column[None, :], mask=tile, other=0.0)
        other = _patched(other, left, right, left_stride, right_stride, rank, token, kept, column, inside,
                         BLOCK, TILE, STEP)  # fmt: skip
        tl.store(target + start + column[None, :], other, mask=tile)
