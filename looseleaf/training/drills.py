"""Drills: one kind of question, asked again and again about the smallest world that has it.

What finds something by its looks and what binds pictures is learned within a hundred steps or two when it is asked for
alone, and may not be in thousands as one question among many.
"""

from __future__ import annotations

from random import Random

from looseleaf.workloads.clips import Clip
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.questions import Size, Split, World
from looseleaf.workloads.scenes import Scenes

OF_CLIPS = ("form_events",)
"""Those that are asked about frames; all others about pictures of any size."""
OF_TWO = ("form_codes", "form_changes", "form_events", "form_matches")
"""Those that need a picture and one before it."""


def drill_world(kind: str, chance: Random, split: Split, size: Size) -> World:
    """As few pictures as `kind` can be asked about, and nothing else to ask."""
    world: World
    if kind in OF_CLIPS:
        world = Clip(chance, split, size[0], frames=chance.choice((2, 3)))
    elif kind == "form_matches":
        world = Documents(chance, split, size)
    else:
        legend = kind in ("form_legend", "form_codes")
        count = 2 if kind in OF_TWO else 1
        world = Scenes(chance, split, size, count=count, legend=legend, pairs=int(kind == "form_changes"))
    world.kinds = {kind: 1.0}
    return world
