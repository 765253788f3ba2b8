"""What is stored for a chunk or a prefix, in parts that are loaded and evicted separately.

A record is plain tensors and the facts needed to use them. How it is found, how long it stays and on which medium it
lies is the store's business; how it is bound into a prompt is the linker's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from looseleaf.kv.layout import KVRows


class Frame(StrEnum):
    """How the keys of a record stand: never guess, every record names it."""

    UNROTATED = "unrotated"
    """As before the rotary: bound anywhere by rotating once."""
    PLACED = "placed"
    """Rotated at the positions they were computed for: valid there only."""


@dataclass(frozen=True, kw_only=True)
class ChunkKV:
    """Keys and values of every layer for one chunk, computed in the canonical context, keys un-rotated."""

    rows: KVRows
    frame: Frame = field(default=Frame.UNROTATED, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows.nbytes


@dataclass(frozen=True, kw_only=True)
class Features:
    """Input embeddings of a chunk's visual rows; for deepstack models also what is added after the first layers.

    embeddings [row, width]; deep: one [row, width] per layer. With these a chunk's tokens are computed again without
    the vision tower.
    """

    embeddings: Tensor
    deep: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.embeddings.nbytes + sum(one.nbytes for one in self.deep)


@dataclass(frozen=True, kw_only=True)
class States:
    """Hidden states [token, width] of a chunk in the canonical context, as they enter `layer`."""

    layer: int
    hidden: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.hidden.nbytes


@dataclass(frozen=True, kw_only=True)
class SequenceKV:
    """Exact rows of one block of a finished prefix, keys rotated at their positions."""

    rows: KVRows
    frame: Frame = field(default=Frame.PLACED, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.rows.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Factors:
    """A matrix [token, width] in few directions: `left` [token, rank], sizes included, times `right` [width, rank]."""

    left: Tensor
    right: Tensor
    shared: bool = False
    """Whether `right` is one of many patches' and held once for all of them."""

    @property
    def rank(self) -> int:
        """Directions kept."""
        return self.left.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.left.nbytes + (0 if self.shared else self.right.nbytes)


@dataclass(frozen=True, kw_only=True)
class Patch:
    """What a chunk's KV lacks behind one antecedent, in few directions: its deficit's factors, keys un-rotated.

    By layer; None where a layer is left as it is stored. A layer's width is its heads side by side.
    """

    keys: tuple[Factors | None, ...]
    values: tuple[Factors | None, ...]
    frame: Frame = field(default=Frame.UNROTATED, init=False)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(one.nbytes for one in (*self.keys, *self.values) if one is not None)

    @cached_property
    def addresses(self) -> NDArray[np.int64]:
        """[keys or values, left or right, layer]: where factors begin in memory, 0 for none, for kernels."""
        found = [
            [[0 if one is None else getattr(one, side).data_ptr() for one in planes] for side in ("left", "right")]
            for planes in (self.keys, self.values)
        ]
        return np.array(found, dtype=np.int64)

    @cached_property
    def alike(self) -> bool:
        """Whether the factors of all layers it has lie alike, on one device, direction behind direction."""
        for planes in (self.keys, self.values):
            kept = [one for one in planes if one is not None]
            steps = [(one.left.stride(), one.right.stride(), one.rank) for one in kept]
            if any(one != steps[0] or one[0][1] != 1 or one[1][1] != 1 for one in steps):
                return False
        sides = [side for one in (*self.keys, *self.values) if one is not None for side in (one.left, one.right)]
        return len({(side.dtype, side.device) for side in sides}) <= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """Where another record lies: its identity."""

    identity: str

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return len(self.identity)


Record: TypeAlias = ChunkKV | Features | States | SequenceKV | Patch | Pointer
