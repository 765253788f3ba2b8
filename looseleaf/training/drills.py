"""Drills: one skill each, asked for alone about the smallest pictures that need it.

What finds something by its looks and what binds pictures is learned within a hundred steps or two when it is asked for
alone, and may not be in thousands as one question among many. A skill that rests on others is drilled once those are
there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from looseleaf.workloads.clips import Clip
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.notes import Note
from looseleaf.workloads.questions import Size, Split, World
from looseleaf.workloads.scenes import Scenes
from looseleaf.workloads.streams import Stream

MakeWorld = Callable[[Random, Split, Size], World]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """One skill: the pictures it needs, what is asked of them, and the skills it rests on."""

    world: MakeWorld | None = None
    """None: words, or a conversation with the search tool."""
    asks: tuple[str, ...] = ()
    """Kinds of question; none: all of the world's."""
    after: tuple[str, ...] = ()
    binds: bool = False
    """Whether a picture must have been read behind another, which half of the prompts then hide from the question."""
    frames: bool = False
    """Whether its pictures are frames; all others have any size."""


def _clip(chance: Random, split: Split, size: Size) -> World:
    return Clip(chance, split, size[0], frames=chance.choice((2, 3, 3, 4)))


def _stream(chance: Random, split: Split, size: Size) -> World:
    return Stream(chance, split, size[0], frames=chance.randint(3, 5), needles=2)


def _several(chance: Random, split: Split, size: Size) -> World:
    return Scenes(chance, split, size, count=chance.choice((2, 2, 3)), legend=False, pairs=0)


_one = partial(Scenes, count=1, legend=False, pairs=0)
_legend = partial(Scenes, count=1, legend=True, pairs=0)
_coded = partial(Scenes, count=2, legend=True, pairs=0)
_pair = partial(Scenes, count=2, legend=False, pairs=1)

DRILLS: dict[str, Drill] = {
    "echo": Drill(),
    "texts": Drill(world=Documents),
    "line": Drill(world=Note, after=("echo",)),
    "cells": Drill(world=_one, asks=("form_cells", "colour", "shape"), after=("line",)),
    "note": Drill(world=Note, after=("line",)),
    "legend": Drill(world=_legend, asks=("form_legend", "form_key", "legend"), after=("cells",)),
    "several": Drill(world=_several, asks=("form_cells", "colour", "shape"), after=("cells",)),
    "codes": Drill(world=_coded, asks=("form_codes", "code"), after=("legend",), binds=True),
    "events": Drill(world=_clip, asks=("form_events", "happened"), after=("cells",), binds=True, frames=True),
    "changes": Drill(
        world=_pair, asks=("form_changes", "changed_cell", "changed_to"), after=("several",), binds=True
    ),
    "things": Drill(world=_one, asks=("form_things", "where", "colour_of"), after=("cells",)),
    "pages": Drill(world=Documents, asks=("form_lines", "form_ids", "form_values", "id_of"), after=("note", "texts")),
    "matches": Drill(world=Documents, asks=("form_matches", "value_of"), after=("pages",)),
    "signs": Drill(world=_stream, asks=("form_signs", "sign"), after=("things",), frames=True),
    "chains": Drill(world=_stream, asks=("form_chains", "sign_chain"), after=("signs",), frames=True),
    "when": Drill(world=_clip, asks=("form_when", "when"), after=("events",), frames=True),
    "search": Drill(after=("note",)),
    "found": Drill(after=("search", "pages")),
}  # fmt: skip
"""In the order in which they are begun, where several could be."""


def drill_world(name: str, chance: Random, split: Split, size: Size) -> World:
    """As few pictures as the skill needs, and nothing else to ask."""
    drill = DRILLS[name]
    assert drill.world is not None
    for _ in range(20):
        world = drill.world(chance, split, size)
        kinds = {kind: weight for kind, weight in world.kinds.items() if not drill.asks or kind in drill.asks}
        if kinds:
            world.kinds = kinds
            return world
    raise AssertionError(f"no world for the drill {name}")
