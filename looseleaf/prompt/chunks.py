"""Prompts and chunks: what `prompt/build.py` makes of messages. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from looseleaf.identity import digest
from looseleaf.model.adapter import Placement


@dataclass(frozen=True, kw_only=True, eq=False)
class Chunk:
    """A cacheable segment: its content identity, its tokens, where they stand, and how to see it.

    `content` covers what was decoded, the processor's settings and the tokens around it. `visual` are the offsets of
    tokens that take a row of features; `inputs` is what the vision tower takes, kept until features are stored.
    """

    kind: str
    content: str
    ids: tuple[int, ...]
    placement: Placement
    visual: tuple[int, ...] = ()
    inputs: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Span:
    """Slots `start:stop` of a prompt: a chunk, or text when there is none."""

    start: int
    stop: int
    start_pos: int
    chunk: Chunk | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A prompt ready to be planned: tokens, spans in order, positions [axis, token], where the answer starts."""

    ids: tuple[int, ...]
    spans: tuple[Span, ...]
    positions: Tensor
    next_pos: int

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def chunks(self) -> tuple[Span, ...]:
        """The spans that hold a chunk."""
        return tuple(span for span in self.spans if span.chunk is not None)

    def positions_to(self, capacity: int) -> Tensor:
        """Positions [axis, slot] of the prompt and of the answer's slots behind it."""
        more = torch.arange(capacity - len(self)) + self.next_pos
        return torch.cat((self.positions, more.expand(self.positions.shape[0], -1)), dim=1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Canonical:
    """The context every chunk is computed in: a fixed preamble without any user's words, or nothing at all."""

    ids: tuple[int, ...]

    @cached_property
    def identity(self) -> str:
        """Part of every chunk record's identity."""
        return digest("canonical", ids=self.ids)


def assemble(pieces: list[tuple[int, ...] | Chunk], *, axes: int, start_pos: int = 0) -> Prompt:
    """Text runs and chunks in order → one prompt. Text advances by one a token, a chunk by its own rule."""
    ids: list[int] = []
    spans: list[Span] = []
    positions: list[Tensor] = []
    at, highest = start_pos, start_pos - 1
    for piece in pieces:
        count = len(piece)
        if not count:
            continue
        chunk = piece if isinstance(piece, Chunk) else None
        spans.append(Span(start=len(ids), stop=len(ids) + count, start_pos=at, chunk=chunk))
        ids.extend(piece.ids if isinstance(piece, Chunk) else piece)
        if chunk is None:
            positions.append((torch.arange(count) + at).expand(axes, -1))
            highest, at = max(highest, at + count - 1), at + count
        else:
            positions.append(chunk.placement.positions + at)
            highest, at = max(highest, at + chunk.placement.reach), at + chunk.placement.advance
    return Prompt(ids=tuple(ids), spans=tuple(spans), positions=torch.cat(positions, dim=1), next_pos=highest + 1)
