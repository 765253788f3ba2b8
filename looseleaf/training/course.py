"""The course of a training: which skill is taken up now, what is rehearsed, how hard prompts are, and when to go on.

To find something by its name and to read are each learned in a few hundred steps when little else is asked, and not at
all in thousands when all tasks start at once. So skills are taken up one by one on small prompts, beside those that are
there; then prompts grow and mix everything, and what is lacking most is drilled most.
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

THERE = 0.95
"""Of the answer tokens right in a drill: the next skill is taken up."""
PATIENCE = 350
"""Steps after which it is taken up in any case."""
FOCUS = 0.6
"""Share of the batches that drill the newest skill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How hard prompts are for a while."""

    until: float
    """Share of the time at which the next level begins at the latest."""
    mixed: float
    """Share of batches that ask about everything."""
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
        until=0.55, mixed=0.0, split=few, sizes=2, pictures=3, frames=3, as_text=0.4, plain=0.2, wide=False
    )  # fmt: skip
    middle = replace(
        small, until=0.68, mixed=0.6, split=some, sizes=4, pictures=4, frames=4, as_text=0.3, plain=0.5, wide=True
    )  # fmt: skip
    whole = Level(
        until=float("inf"), mixed=0.8, split=trained(), sizes=None, pictures=99, frames=99, as_text=0.2, plain=1.0,
        wide=True,
    )  # fmt: skip
    return small, middle, whole


class Course:
    """Where a training stands: moved on by the loop, read by the processes that make batches."""

    def __init__(self, mixed: Mapping[str, float]) -> None:
        """`mixed`: shares of the batches that ask about everything; skills nobody needs there are left out."""
        self.levels = levels()
        self._mixed = {kind: share for kind, share in mixed.items() if share}
        needless = {"streams": ("chains",), "lookups": ("search", "found")}
        left_out = {skill for kind, skills in needless.items() if kind not in self._mixed for skill in skills}
        self.skills = [skill for skill in DRILLS if skill not in left_out]
        self.right = dict.fromkeys(self.skills, 0.0)
        self._taken, self._since = 1, 0
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
    def newest(self) -> str:
        """The skill taken up last."""
        return self.skills[self._taken - 1]

    @property
    def shares(self) -> dict[str, float]:
        """Of the kinds of batch now."""
        return {kind: share for kind, share in zip(BATCHES, self._shares.tolist(), strict=True) if share}

    def heed(self, step: int, spent: float, right: Mapping[str, float]) -> bool:
        """Go by what was `right` in the drills lately and by the share of the time; whether anything is new."""
        self.right |= {skill: value for skill, value in right.items() if skill in self.right}
        done = self.right[self.newest] >= THERE or step - self._since >= PATIENCE
        if self.number == 0:
            last = self._taken == len(self.skills)
            if spent >= self.level.until or (done and last):
                self._taken = len(self.skills)
                grown = new = True
            else:
                grown, new = False, done
                self._taken += done
        else:
            grown = new = self.number < len(self.levels) - 1 and spent >= self.level.until
        self._number += grown
        self._since = step if new else self._since
        self._share_out()
        return new

    def _share_out(self) -> None:
        """The newest skill and those that are there, or everything and what is lacking."""
        taken = self.skills[: self._taken]
        weights = {skill: 0.05 + max(0.0, THERE - self.right[skill]) for skill in taken}
        focus = FOCUS if self.number == 0 and len(taken) > 1 else 0.0
        if focus:
            del weights[self.newest]
        left, total = 1 - self.level.mixed - focus, sum(weights.values())
        shares = {skill: left * weight / total for skill, weight in weights.items()}
        shares |= {self.newest: focus} if focus else {}
        shares |= {kind: self.level.mixed * share / sum(self._mixed.values()) for kind, share in self._mixed.items()}
        self._shares.copy_(torch.tensor([shares.get(kind, 0.0) for kind in BATCHES]))


def pick_kind(shares: Mapping[str, float], chance: Random) -> str:
    """A kind of batch by its share."""
    return chance.choices(list(shares), list(shares.values()))[0]


def pick_size(kind: str, level: Level, bounds: Bounds, chance: Random) -> Size:
    """Of the pictures of one batch: half are of the usual size once that is among the level's."""
    if kind in ("clips", "streams") or (kind in DRILLS and DRILLS[kind].frames):
        return bounds.frame_side, bounds.frame_side
    if kind == "line":
        return bounds.note
    sizes = sorted(bounds.sizes, key=lambda size: size[0] * size[1])[: level.sizes]
    return bounds.sizes[0] if bounds.sizes[0] in sizes and chance.random() < 0.5 else chance.choice(sizes)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
