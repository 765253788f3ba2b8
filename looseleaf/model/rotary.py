"""Rotary algebra: turn stored keys to the positions they are used at, and back.

Takes un-rotated keys and the cosines and sines a model's own rotary module gives for some positions (scaled, blocked or
interleaved over axes as that model does it, attention factor included), and repeats, operation by operation, what the
model does to a fresh key: the result is the model's to the last bit. Rotated keys are never rotated again. Knows
nothing of layers, chunks or engines.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class PairOrder(StrEnum):
    """Which two numbers of a key turn together, and where they end up."""

    HALVES = "halves"
    """(i, i + d/2), in place: Llama, Qwen, Mistral, most others."""
    PAIRS_TO_HALVES = "pairs-to-halves"
    """(2i, 2i + 1), laid out as halves afterwards: DeepSeek-V3, Kimi-K2.5."""
    PAIRS = "pairs"
    """(2i, 2i + 1), in place: GLM, and DeepSeek-V2, which computes in fp32."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Cosines and sines of some positions, [token, pair]; the attention factor is in them, once."""

    cos: Tensor
    sin: Tensor

    def __getitem__(self, tokens: slice) -> Phase:
        return Phase(cos=self.cos[tokens], sin=self.sin[tokens])


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryForm:
    """How a model turns its keys: the order of pairs, and how many leading numbers turn (partial rotary)."""

    order: PairOrder
    dim: int


def rotate(keys: Tensor, phase: Phase, form: RotaryForm, out: Tensor | None = None) -> Tensor:
    """Turn un-rotated keys to the positions of `phase`. keys [..., token, dim]; `out` must not overlap `keys`."""
    out = torch.empty_like(keys) if out is None else out
    cos, sin = phase.cos, phase.sin
    first, second = _pairs(keys, form)
    if form.order is PairOrder.PAIRS:
        first, second = first.to(cos.dtype), second.to(cos.dtype)
        out[..., 0 : form.dim : 2] = (first * cos - second * sin).to(keys.dtype)
        out[..., 1 : form.dim : 2] = (first * sin + second * cos).to(keys.dtype)
    else:
        half = form.dim // 2
        torch.mul(first, cos, out=out[..., :half]).sub_(second * sin)
        torch.mul(second, cos, out=out[..., half : form.dim]).add_(first * sin)
    if form.dim < keys.shape[-1]:
        out[..., form.dim :] = keys[..., form.dim :]
    return out


def unrotate(keys: Tensor, phase: Phase, form: RotaryForm) -> Tensor:
    """Turn rotated keys back, in fp32, attention factor taken out: for models that never show an un-rotated key."""
    cos, sin = phase.cos.float(), phase.sin.float()
    size = cos * cos + sin * sin
    turned = keys.float()
    if form.order is PairOrder.PAIRS:
        first, second = turned[..., 0 : form.dim : 2], turned[..., 1 : form.dim : 2]
    else:
        first, second = turned[..., : form.dim // 2], turned[..., form.dim // 2 : form.dim]
    back_first, back_second = (first * cos + second * sin) / size, (second * cos - first * sin) / size
    out = torch.empty_like(keys)
    if form.order is PairOrder.HALVES:
        out[..., : form.dim // 2] = back_first.to(keys.dtype)
        out[..., form.dim // 2 : form.dim] = back_second.to(keys.dtype)
    else:
        out[..., 0 : form.dim : 2] = back_first.to(keys.dtype)
        out[..., 1 : form.dim : 2] = back_second.to(keys.dtype)
    out[..., form.dim :] = keys[..., form.dim :]
    return out


def _pairs(keys: Tensor, form: RotaryForm) -> tuple[Tensor, Tensor]:
    if form.order is PairOrder.HALVES:
        half = form.dim // 2
        return keys[..., :half], keys[..., half : form.dim]
    return keys[..., 0 : form.dim : 2], keys[..., 1 : form.dim : 2]
