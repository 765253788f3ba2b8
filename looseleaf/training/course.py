"""The course of a training: what is asked in which stage, and when to go on.

To find something by its name and to read are each learned in a few hundred steps when little else is asked, and not at
all in thousands when all tasks start at once. So words come first, then notes, then drills of what is seen, found and
bound, then everything. A stage ends when its skills are there, or when it has had its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from random import Random

import torch

from looseleaf.training.drills import OF_CLIPS
from looseleaf.workloads.bounds import Bounds
from looseleaf.workloads.questions import Size, Split, first_steps, trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """How hard prompts are for a while."""

    most: float
    """Steps, at most."""
    skills: Mapping[str, float] = field(default_factory=dict)
    """Answer tokens right by kind of question at which it ends before; none: it takes its time."""
    shares: Mapping[str, float]
    """Of the kinds of batch, beside what the diet gives them."""
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
    drills: tuple[str, ...] = ()
    """What its drills ask, one kind a batch."""


def stages(*, lookups: bool = True) -> tuple[Stage, ...]:
    """From words to everything: what is drilled in one stage is rehearsed among all else in the next.

    `lookups`: whether the model is to search for what it is not shown.
    """
    few, some = first_steps()
    words = Stage(
        most=350, skills={"form_ids": 0.95, "form_matches": 0.95, "echo": 0.9}, shares={"words": 1}, split=few, sizes=2,
        pictures=2, frames=3, as_text=1.0, plain=0.1, wide=False,
    )  # fmt: skip
    reading = replace(
        words, most=350, skills={"form_note": 0.9}, shares={"words": 0.2, "notes": 0.8},
        split=replace(few, most_lines=1),
    )  # fmt: skip

    def drill(most: float, *kinds: str) -> Stage:
        return replace(
            words, most=most, skills=dict.fromkeys(kinds, 0.95), drills=kinds,
            shares={"words": 0.05, "notes": 0.2, "pictures": 0.15, "clips": 0.05, "drills": 0.55}, as_text=0.5,
        )  # fmt: skip

    growing = replace(
        words, most=500, skills={"form_cells": 0.98, "form_codes": 0.97, "form_changes": 0.97, "form_events": 0.95},
        shares={"words": 0.05, "notes": 0.05}, split=some, sizes=4, pictures=4, frames=4, as_text=0.3, plain=0.5,
        wide=True,
    )  # fmt: skip
    whole = Stage(
        most=float("inf"), shares={"words": 0.02, "notes": 0.03}, split=trained(), sizes=None, pictures=99, frames=99,
        as_text=0.2, plain=1.0, wide=True,
    )  # fmt: skip
    seeing = drill(350, "form_cells")
    finding = drill(300, "form_legend", "form_things")
    binding = drill(250, "form_codes")
    comparing = drill(350, "form_changes", "form_events")
    asking = replace(
        words, most=250, skills={"search": 0.95, "found": 0.95}, as_text=0.5,
        shares={"words": 0.05, "notes": 0.1, "pictures": 0.25, "clips": 0.1, "lookups": 0.5},
    )  # fmt: skip
    return words, reading, seeing, finding, binding, comparing, *([asking] if lookups else []), growing, whole


class Course:
    """Where a training stands: moved on by the loop, read by the processes that make batches."""

    def __init__(self, *, lookups: bool = True) -> None:
        self.stages = stages(lookups=lookups)
        self._number = torch.zeros((), dtype=torch.int64)
        self._number.share_memory_()  # type: ignore[no-untyped-call]
        self._since = 0

    @property
    def number(self) -> int:
        """Of the stage, from 0."""
        return int(self._number)

    @property
    def stage(self) -> Stage:
        """What is asked now."""
        return self.stages[self.number]

    def heed(self, step: int, right: Mapping[str, float]) -> bool:
        """Go on to the next stage if what was `right` lately says so, or the time; whether it did."""
        stage = self.stage
        learned = stage.skills and all(right.get(kind, 0.0) >= enough for kind, enough in stage.skills.items())
        if not learned and step - self._since < stage.most:
            return False
        self._number += 1
        self._since = step
        return True


def pick_size(kind: str, stage: Stage, bounds: Bounds, chance: Random) -> Size:
    """Of the pictures of one batch: half are of the usual size once that is among the stage's."""
    if kind in ("clips", "streams", *OF_CLIPS):
        return bounds.frame_side, bounds.frame_side
    if kind == "notes" and (stage.split.most_lines <= 2 or chance.random() < 0.3):
        return bounds.note
    sizes = sorted(bounds.sizes, key=lambda size: size[0] * size[1])[: stage.sizes]
    return bounds.sizes[0] if bounds.sizes[0] in sizes and chance.random() < 0.5 else chance.choice(sizes)
