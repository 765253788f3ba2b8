"""The course of a training: how hard prompts are, and which skill is drilled beside everything else.

To find something by its name and to read are each learned in a few hundred steps when little else is asked, and not at
all in thousands when all tasks start at once: so it begins with words, then lines to read, then small pictures. From
then on everything is asked, and the first skill that is lacking is drilled beside it until it is there.
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

THERE = 0.97
"""Of a skill's answer tokens right: it is not drilled any more."""
ALMOST = 0.85
"""Of them right: it is drilled on whole prompts."""
PATIENCE = 300
"""Steps after which another skill that is lacking has its turn."""
LONGEST = 5
"""A level lasts at most so many times its steps."""
FOCUS = 0.5
"""Share of the batches that drill the skill in turn."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How hard prompts are for a while."""

    steps: float
    """How long it lasts, at least."""
    needs: str | None = None
    """A skill that must almost be there before the next one begins, unless that takes LONGEST times as long."""
    shares: Mapping[str, float]
    """Of kinds of batch; what is left is mixed as the diet says."""
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
    wide: bool = False
    """Whether positions are skipped and words stand between pictures."""
    drills: bool = False
    """Whether skills that are lacking are drilled."""


def levels() -> tuple[Level, ...]:
    """From words to everything."""
    few, some = first_steps()
    words = Level(
        steps=300, shares={"words": 1}, split=few, sizes=2, pictures=2, frames=3, as_text=1.0, plain=0.1
    )  # fmt: skip
    reading = replace(
        words, steps=200, needs="line", shares={"words": 0.2, "line": 0.8}, split=replace(few, most_lines=1)
    )
    looking = replace(
        reading, steps=200, needs=None, shares={"words": 0.2, "line": 0.4, "pictures": 0.4},
        split=replace(few, most_lines=2), as_text=0.5,
    )  # fmt: skip
    finding = replace(
        looking, steps=400, shares={"words": 0.1, "line": 0.2, "pictures": 0.5, "clips": 0.1, "streams": 0.1},
        split=few, as_text=0.4, plain=0.3,
    )  # fmt: skip
    growing = replace(
        finding, steps=900, shares={"words": 0.05, "line": 0.1}, split=some, sizes=4, pictures=3, frames=4,
        as_text=0.3, plain=0.5, drills=True,
    )  # fmt: skip
    whole = Level(
        steps=float("inf"), shares={"words": 0.05, "line": 0.03}, split=trained(), sizes=None, pictures=99, frames=99,
        as_text=0.2, plain=1.0, wide=True, drills=True,
    )  # fmt: skip
    return words, reading, looking, finding, growing, whole


class Course:
    """Where a training stands: moved on by the loop, read by the processes that make batches."""

    def __init__(self, mixed: Mapping[str, float]) -> None:
        """`mixed`: shares of the batches that ask about everything; skills nobody needs there are left out."""
        self.levels = levels()
        self._mixed = {kind: share / sum(mixed.values()) for kind, share in mixed.items() if share}
        needless = {"streams": ("chains",), "lookups": ("search", "found")}
        left_out = {skill for kind, skills in needless.items() if kind not in self._mixed for skill in skills}
        self.skills = [skill for skill in DRILLS if skill not in left_out]
        self.right = dict.fromkeys(self.skills, 0.0)
        self.drilled: str | None = None
        """The skill whose turn it is."""
        self._since = self._begun = 0
        self._number, self._drill_number = (_shared(torch.zeros((), dtype=torch.int64)) for _ in range(2))
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

    def level_of(self, kind: str) -> Level:
        """How hard a batch is now: a skill that is hardly there is drilled on prompts that are not whole yet."""
        return self.levels[int(self._drill_number)] if kind in DRILLS else self.level

    @property
    def shares(self) -> dict[str, float]:
        """Of the kinds of batch now."""
        return {kind: share for kind, share in zip(BATCHES, self._shares.tolist(), strict=True) if share}

    def heed(self, step: int, right: Mapping[str, float]) -> bool:
        """Go by the step and by what was `right` lately; whether anything is new."""
        self.right |= {skill: value for skill, value in right.items() if skill in self.right}
        before = self.number, self.drilled
        if self._over(step - self._begun):
            self._number += 1
            self._begun = step
        if self.level.drills:
            done = self.drilled is None or self.right[self.drilled] >= THERE
            if done or step - self._since >= PATIENCE:
                self.drilled, self._since = self._next(), step
        small = self.drilled is not None and self.right[self.drilled] < ALMOST
        self._drill_number.fill_(min(self.number, len(self.levels) - 1 - small))
        self._share_out()
        return before != (self.number, self.drilled)

    def _over(self, steps: int) -> bool:
        """Whether a level that lasted so long makes way."""
        skill = self.level.needs
        ready = skill is None or self.right[skill] >= ALMOST
        return steps >= self.level.steps * (1 if ready else LONGEST)

    def _next(self) -> str | None:
        """The next skill that is lacking, in the order of the drills and round again."""
        at = 0 if self.drilled is None else self.skills.index(self.drilled) + 1
        return next((one for one in self.skills[at:] + self.skills[:at] if self.right[one] < THERE), None)

    def _share_out(self) -> None:
        """The level's shares, what is mixed, and the skill in turn."""
        shares = {kind: share for kind, share in self.level.shares.items() if kind in DRILLS or kind in self._mixed}
        left = max(0.0, 1 - sum(self.level.shares.values()))
        for kind, share in self._mixed.items():
            shares[kind] = shares.get(kind, 0.0) + left * share
        if self.drilled is not None:
            shares = {kind: (1 - FOCUS) * share for kind, share in shares.items()}
            shares[self.drilled] = shares.get(self.drilled, 0.0) + FOCUS
        self._shares.copy_(torch.tensor([shares.get(kind, 0.0) for kind in BATCHES]))


def pick_kind(shares: Mapping[str, float], chance: Random) -> str:
    """A kind of batch by its share."""
    return chance.choices(list(shares), list(shares.values()))[0]


def pick_size(kind: str, level: Level, bounds: Bounds, chance: Random) -> Size:
    """Of the pictures of one batch: half are of the usual size once that is among the level's."""
    if kind in ("clips", "streams") or (kind in DRILLS and DRILLS[kind].frames):
        side = bounds.frame_side if level.sizes is None else bounds.first_side or bounds.frame_side
        return side, side
    if kind == "line":
        return bounds.note
    every = bounds.sizes if level.sizes is None else bounds.first_sizes or bounds.sizes
    sizes = sorted(every, key=lambda size: size[0] * size[1])[: level.sizes]
    return bounds.sizes[0] if bounds.sizes[0] in sizes and chance.random() < 0.5 else chance.choice(sizes)


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor
