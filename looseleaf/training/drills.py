"""Drills: one skill each, asked for alone about the smallest pictures that need it.

What finds something by its looks and what binds pictures is learned within a hundred steps or two when it is the only
thing not known yet, and may not be in thousands as one question among many: Muon's steps are all of one length, so
whatever is furthest from known takes them. And a skill must be asked for whole from the start: cells of a single
picture were learned in a way that never came to heed which of several was meant, and a key read by its cells was never
read by its shapes.
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
    """One skill: the pictures it needs and what is asked of them."""

    world: MakeWorld | None = None
    """None: words, or a conversation with the search tool."""
    asks: tuple[str, ...]
    """Kinds of question; the first is the one it is judged by."""
    binds: bool = False
    """Whether a picture must have been read behind another, which half of the prompts then hide from the question."""
    frames: bool = False
    """Whether its pictures are frames; all others have any size."""


def _clip(chance: Random, split: Split, size: Size) -> World:
    return Clip(chance, split, size[0], frames=chance.choice((2, 3, 3, 4)))


def _stream(chance: Random, split: Split, size: Size) -> World:
    return Stream(chance, split, size[0], frames=chance.randint(3, 5), needles=2)


def _scenes(chance: Random, split: Split, size: Size) -> World:
    return Scenes(chance, split, size, count=chance.choice((1, 2, 2, 3)), legend=False, pairs=0)


_several = partial(Scenes, count=3, legend=False, pairs=0)
_legend = partial(Scenes, count=1, legend=True, pairs=0)
_coded = partial(Scenes, count=2, legend=True, pairs=0)
_pair = partial(Scenes, count=2, legend=False, pairs=1)

DRILLS: dict[str, Drill] = {
    "words": Drill(asks=("form_matches", "form_ids", "form_values", "form_lines", "value_of")),
    "line": Drill(world=Note, asks=("form_note", "note")),
    "cells": Drill(world=_scenes, asks=("form_cells", "colour", "shape")),
    "tags": Drill(world=_several, asks=("form_tags", "tag")),
    "legend": Drill(world=_legend, asks=("form_legend", "legend")),
    "codes": Drill(world=_coded, asks=("form_codes", "code"), binds=True),
    "events": Drill(world=_clip, asks=("form_events", "happened"), binds=True, frames=True),
    "changes": Drill(world=_pair, asks=("form_changes",), binds=True),
    "changed": Drill(world=_pair, asks=("changed_cell", "changed_to"), binds=True),
    "pages": Drill(world=Documents, asks=("form_ids", "form_values", "form_lines", "id_of")),
    "matches": Drill(world=Documents, asks=("form_matches", "value_of")),
    "found": Drill(asks=("found",)),
    "when": Drill(world=_clip, asks=("form_when", "when"), frames=True),
    "chains": Drill(world=_stream, asks=("form_chains", "form_signs", "sign", "sign_chain"), frames=True),
    "search": Drill(asks=("search",)),
}  # fmt: skip
"""In the order in which they are drilled when they are lacking."""


def drill_world(name: str, chance: Random, split: Split, size: Size) -> World:
    """As few pictures as the skill needs, and nothing else to ask."""
    drill = DRILLS[name]
    assert drill.world is not None
    for _ in range(20):
        world = drill.world(chance, split, size)
        kinds = {kind: weight for kind, weight in world.kinds.items() if kind in drill.asks}
        if kinds:
            world.kinds = kinds
            return world
    raise AssertionError(f"no world for the drill {name}")
