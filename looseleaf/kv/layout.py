"""What one layer keeps for one token, and a buffer that holds it for many.

A layer keeps two planes: `keys`, which turn with position, and `values`, which do not. For MHA and GQA these are what
their names say. For MLA the keys are the rope band k_pe and the values are the latent c_kv: storing, relocating and
patching then read the same for every attention family. Nothing here knows a model, a position or a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Plane:
    """The shape of one token's keys (or values) in one layer."""

    heads: int
    dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerLayout:
    """What a layer keeps; `latent` says that keys and values are MLA's rope band and latent."""

    keys: Plane
    values: Plane
    latent: bool = False

    @property
    def elements(self) -> int:
        """Numbers kept per token."""
        return self.keys.heads * self.keys.dim + self.values.heads * self.values.dim


@dataclass(frozen=True, kw_only=True)
class KVLayout:
    """What every layer of a model keeps for one token."""

    layers: tuple[LayerLayout, ...]
    dtype: torch.dtype

    VERSION = 1

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token over all layers."""
        return sum(layer.elements for layer in self.layers) * self.dtype.itemsize

    @cached_property
    def alike(self) -> bool:
        """Whether every layer keeps the same."""
        return all(layer == self.layers[0] for layer in self.layers)

    def describe(self) -> str:
        """A stable text of the layout, part of every record's identity."""
        shapes = ";".join(
            f"{one.keys.heads}x{one.keys.dim},{one.values.heads}x{one.values.dim}{',latent' if one.latent else ''}"
            for one in self.layers
        )
        return f"v{self.VERSION} {self.dtype} {shapes}"

    @classmethod
    def parse(cls, text: str) -> KVLayout:
        """What `describe` wrote; ValueError for anything else."""
        version, dtype, shapes = text.split(" ")
        layers = []
        for shape in shapes.split(";"):
            keys, values, *latent = shape.split(",")
            planes = [
                Plane(heads=int(one), dim=int(other)) for one, other in (each.split("x") for each in (keys, values))
            ]
            layers.append(LayerLayout(keys=planes[0], values=planes[1], latent=latent == ["latent"]))
        found = cls(layers=tuple(layers), dtype=getattr(torch, dtype.removeprefix("torch."), torch.uint8))
        if version != f"v{cls.VERSION}" or found.describe() != text:
            raise ValueError(f"not a layout: {text!r}")
        return found


class KVRows:
    """Keys and values of `tokens` rows in every layer: keys[layer] and values[layer] are [head, token, dim].

    A buffer made here is one flat piece, ordered layer → keys, values → head → token → dim, so that a layer is
    contiguous and, within it, so is a head.
    """

    def __init__(self, layout: KVLayout, tokens: int, device: torch.device | str = "cpu"):
        self.layout = layout
        self.tokens = tokens
        data = torch.empty(tokens * layout.row_bytes // layout.dtype.itemsize, dtype=layout.dtype, device=device)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        offset = 0
        for layer in layout.layers:
            for plane, views in ((layer.keys, self.keys), (layer.values, self.values)):
                count = plane.heads * tokens * plane.dim
                views.append(data[offset : offset + count].view(plane.heads, tokens, plane.dim))
                offset += count

    @classmethod
    def of_views(cls, layout: KVLayout, keys: list[Tensor], values: list[Tensor]) -> KVRows:
        """Rows that lie somewhere else."""
        rows = cls.__new__(cls)
        rows.layout, rows.tokens, rows.keys, rows.values = layout, keys[0].shape[1], keys, values
        return rows

    def part(self, start: int, stop: int) -> KVRows:
        """Some of the rows, as views."""
        keys, values = ([one[:, start:stop] for one in planes] for planes in (self.keys, self.values))
        return KVRows.of_views(self.layout, keys, values)

    def copy(self) -> KVRows:
        """The same rows in a buffer of their own."""
        rows = KVRows(self.layout, self.tokens, self.device)
        for mine, own in zip((*rows.keys, *rows.values), (*self.keys, *self.values), strict=True):
            mine.copy_(own)
        return rows

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """[keys or values, layer]: where the planes begin in memory, for kernels."""
        return np.array([[one.data_ptr() for one in planes] for planes in (self.keys, self.values)], dtype=np.int64)

    @cached_property
    def alike(self) -> bool:
        """Whether all layers lie as the first does: one shape, dtype and device, row behind row."""
        if not self.layout.alike:
            return False
        for first, *others in (self.keys, self.values):
            if first.stride(2) != 1 or first.stride(1) != first.shape[2]:
                return False
            about = first.stride(), first.dtype, first.device
            if any((one.stride(), one.dtype, one.device) != about for one in others):
                return False
        return True

    @cached_property
    def aligned(self) -> bool:
        """Whether every head of every plane begins at a multiple of 16 bytes."""
        return all(
            one.data_ptr() % 16 == 0 and one.stride(0) * one.itemsize % 16 == 0 for one in (*self.keys, *self.values)
        )

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.tokens * self.layout.row_bytes

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.keys[0].device
