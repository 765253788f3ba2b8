"""The course of a training: which skills are drilled now, how hard prompts are, and when to go on.

To find something by its name and to read are each learned in a few hundred steps when little else is asked, and not at
all in thousands when all tasks start at once. So a skill is drilled once those it rests on are there, and less once it
is there itself; the more skills are there, the more prompts mix everything. Prompts grow when all skills are there, or
when it is time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import torch

from looseleaf.training.drills import DRILLS
from looseleaf.workloads.bounds import Bounds
from looseleaf.workloads.questions import Size, Split, first_steps, trained

MIXED = ("pictures", "clips", "streams", "lookups")
"""Batches that ask about everything; shares are the diet's."""
BATCHES = (*DRILLS, *MIXED)

BEGUN, THERE, SURE = 0.85, 0.95, 0.98
"""Answer tokens right in a drill: others may rest on it; it is there; it needs little more."""
AT_ONCE = 3
"""Skills that are begun at the same time, in the drills' order, while prompts are small."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How hard prompts are for a while."""

    until: float
    """Share of the time at which the next level begins at the latest."""
    mixed: float
    """Share of batches that ask about everything, when all skills are there."""
    split: Split
    sizes: int | None
    """How many of the sizes, from the smallest."""
    pictures: int
    """At most, of an album."""
    frames: int
    """At most, of a clip; a stream has up to twice as many."""
    as_text: float
    """Share of pages given as words."""
    plain: float
    """Share of plain questions beside forms, times the worlds' own."""
    wide: bool
    """Whether positions are skipped and words stand between pictures."""


def levels() -> tuple[Level, ...]:
    """From a few small pictures to everything."""
    few, some = first_steps()
    small = Level(
        until=0.45, mixed=0.6, split=few, sizes=2, pictures=3, frames=3, as_text=0.4, plain=0.3, wide=False
    )  # fmt: skip
    middle = replace(
        small, until=0.6, mixed=0.7, split=some, sizes=4, pictures=4, frames=4, as_text=0.3, plain=0.5, wide=True
    )  # fmt: skip
    whole = Level(
        until=float("inf"), mixed=0.9, split=trained(), sizes=None, pictures=99, frames=99, as_text=0.2, plain=1.0,
        wide=True,
    )  # fmt: skip
    return small, middle, whole


class Course:
    """Where a training stands: moved on by the loop, read by the processes that make batches."""

    def __init__(self, mixed: Mapping[str, float]) -> None:
        """`mixed`: shares of the batches that ask about everything; skills nobody needs there are left out."""
        self.levels = levels()
        self._mixed = {kind: share for kind, share in mixed.items() if share}
        needless = {"streams": ("signs", "chains"), "lookups": ("search", "found")}
        left_out = {skill for kind, skills in needless.items() if kind not in self._mixed for skill in skills}
        self.skills = [skill for skill in DRILLS if skill not in left_out]
        self.right = dict.fromkeys(self.skills, 0.0)
        self._best = dict(self.right)
        self._number = _shared(torch.zeros((), dtype=torch.int64))
        self._shares = _shared(torch.zeros(len(BATCHES)))
        self._share_out()

    @property
    def number(self) -> int:
        """Of the level, from 0."""
        return int(self._number)

    @property
    def level(self) -> Level:
        """How hard prompts are now."""
        return self.levels[self.number]

    @property
    def shares(self) -> dict[str, float]:
        """Of the kinds of batch now."""
        return {kind: share for kind, share in zip(BATCHES, self._shares.tolist(), strict=True) if share}

    def heed(self, spent: float, right: Mapping[str, float]) -> bool:
        """Go by what was `right` in the drills lately and by the share of the time; whether a level was reached."""
        self.right |= {skill: value for skill, value in right.items() if skill in self.right}
        self._best = {skill: max(self._best[skill], value) for skill, value in self.right.items()}
        grown = self.number < len(self.levels) - 1 and (
            spent >= self.level.until or all(value >= THERE for value in self.right.values())
        )
        if grown:
            self._number += 1
        self._share_out()
        return grown

    def _share_out(self) -> None:
        open_ = [skill for skill in self.skills if all(self._best[one] >= BEGUN for one in DRILLS[skill].after)]
        weights = {skill: 1.0 if (v := self.right[skill]) < THERE else 0.3 if v < SURE else 0.05 for skill in open_}
        if self.number == 0:
            begun = [skill for skill in open_ if self._best[skill] < THERE]
            weights = {skill: weight for skill, weight in weights.items() if skill not in begun[AT_ONCE:]}
        there = sum(self._best[skill] >= THERE for skill in self.skills) / len(self.skills)
        mixed = self.level.mixed * there if self._best["cells"] >= BEGUN else 0.0
        total = sum(weights.values())
        shares = {skill: (1 - mixed) * weight / total for skill, weight in weights.items()}
        shares |= {kind: mixed * share / sum(self._mixed.values()) for kind, share in self._mixed.items()}
        self._shares.copy_(torch.tensor([shares.get(kind, 0.0) for kind in BATCHES]))


def pick_kind(shares: Mapping[str, float], chance: Random) -> str:
    """A kind of batch by its share."""
    return chance.choices(list(shares), list(shares.values()))[0]


def pick_size(kind: str, level: Level, bounds: Bounds, chance: Random) -> Size:
    """Of the pictures of one batch: half are of the usual size once that is among the level's."""
    if kind in ("clips", "streams") or (kind in DRILLS and DRILLS[kind].frames):
        return bounds.frame_side, bounds.frame_side
    if kind == "line" or (kind == "note" and chance.random() < 0.3):
        return bounds.note
    sizes = sorted(bounds.sizes, key=lambda size: size[0] * size[1])[: level.sizes]
    return bounds.sizes[0] if bounds.sizes[0] in sizes and chance.random() < 0.5 else chance.choice(sizes)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
