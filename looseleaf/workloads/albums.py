"""Albums: the pictures of one prompt, from one or several worlds, shuffled together, and the questions about them.

A world's own pictures keep their order (a legend stands before the scenes it explains); worlds are interleaved at
random, so that a question's pictures stand anywhere among others it does not need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from looseleaf.prompt.segments import Document, Image
from looseleaf.workloads.clips import Clip
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.pictures import Picture, draw
from looseleaf.workloads.questions import Question, Size, Split, World
from looseleaf.workloads.scenes import Scenes
from looseleaf.workloads.streams import Stream

Entry = Picture | str
"""A picture, or a page as words."""

HEADLINE = {
    "legend": (("colour", "shape"), ("code",)),
    "change": (("colour", "shape"), ("changed_cell", "changed_to")),
    "documents": (("id_of", "value_of_id"), ("value_of",)),
    "documents as text": (("id_of", "value_of_id"), ("value_of",)),
    "clip": (("frame_colour", "frame_shape"), ("happened", "when")),
    "stream": (("sign",), ("sign_chain",)),
}
"""The kinds of question figures are reported on: single-hop, then multi-hop, by task."""


def as_segment(entry: Entry) -> Image | Document:
    """An entry as it stands in a prompt; a page of words starts a line of its own."""
    return Document(f"\n{entry}") if isinstance(entry, str) else Image(draw(entry))


class Album:
    """The entries of one prompt in order, and the worlds they come from."""

    def __init__(self, chance: Random, worlds: Sequence[World], *, as_text: Sequence[World] = ()) -> None:
        self.worlds = list(worlds)
        order = [number for number, world in enumerate(worlds) for _ in world.pictures]
        chance.shuffle(order)
        self.entries: list[Entry] = []
        self._places: list[list[int]] = [[] for _ in worlds]
        for number in order:
            world, place = worlds[number], len(self._places[number])
            self._places[number].append(len(self.entries))
            if world in as_text and isinstance(world, Documents):
                self.entries.append(world.texts()[place])
            else:
                self.entries.append(world.pictures[place])

    def ask(self, number: int, kind: str, chance: Random, split: Split) -> Question:
        """A question of `kind` about world `number`; `needs` counts this album's entries."""
        question = self.worlds[number].ask(kind, chance, split)
        places = self._places[number]
        if len(places) == len(self.entries):
            return question

        def placed(own: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(places[at] for at in own)

        return replace(
            question,
            needs=placed(question.needs),
            carriers=placed(question.carriers),
            facts=tuple(fact._replace(carriers=placed(fact.carriers)) for fact in question.facts),
        )

    def absorbed(self) -> list[int]:
        """Entries that questions can do without, because later ones were read behind them."""
        return [places[at] for world, places in zip(self.worlds, self._places, strict=True) for at in world.absorbed]

    def kinds(self) -> list[tuple[int, str, float]]:
        """Every world and kind of question it takes, with how often training asks it."""
        return [
            (number, kind, weight) for number, world in enumerate(self.worlds) for kind, weight in world.kinds.items()
        ]


def mixed_album(chance: Random, split: Split, size: Size, count: int, *, as_text: float = 0.25) -> Album:
    """`count` pictures of `size`: scenes, often with a legend or two versions, and often two pages.

    A share of the pages is given as words instead.
    """
    worlds: list[World] = []
    text: list[World] = []
    if count >= 2 and chance.random() < (0.5 if count > 2 else 0.4):
        worlds.append(Documents(chance, split, size))
        if chance.random() < as_text:
            text.append(worlds[0])
    rest = count - 2 * len(worlds)
    if rest:
        legend = rest >= 2 and chance.random() < 0.8
        room = rest - legend
        pairs = int(room >= 2 and chance.random() < 0.75)
        worlds.append(Scenes(chance, split, size, count=rest, legend=legend, pairs=pairs))
    return Album(chance, worlds, as_text=text)


def task_album(task: str, chance: Random, split: Split, size: Size, count: int) -> Album:
    """An album in which the headline questions of `task` can be asked; `count` frames for clips and streams."""
    if task == "clip":
        return Album(chance, [Clip(chance, split, size[0], frames=count)])
    if task == "stream":
        return Album(chance, [Stream(chance, split, size[0], frames=count, needles=max(2, count // 4))])
    if task.startswith("documents"):
        pages = Documents(chance, split, size)
        worlds: list[World] = [pages]
        if count > 2:
            worlds.append(Scenes(chance, split, size, count=count - 2, legend=count > 3, pairs=0))
        return Album(chance, worlds, as_text=[pages] if task == "documents as text" else [])
    spare = count - 3
    pages_too = spare >= 2 and chance.random() < 0.5
    scenes = Scenes(
        chance, split, size, count=count - 2 * pages_too,
        legend=task == "legend" or count > 2, pairs=int(task == "change"),
    )  # fmt: skip
    others: list[World] = [Documents(chance, split, size)] if pages_too else []
    return Album(chance, [scenes, *others])


def headline_question(task: str, hops: int, album: Album, chance: Random, split: Split) -> Question | None:
    """One of the questions figures are reported on, or None where this album has none of them."""
    kinds = set(HEADLINE[task][hops > 1]) & set(album.worlds[0].kinds)
    return album.ask(0, chance.choice(sorted(kinds)), chance, split) if kinds else None
