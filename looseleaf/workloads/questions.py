"""Questions, the splits that keep what is measured apart from what was trained on, and phrases with held-out wordings.

A Question knows its answer, how many pictures had to be connected for it (`hops`), which pictures it rests on (`needs`)
and which of them must still be in view when the others were absorbed (`carriers`): the code of a shape needs the legend
and the scene, but a scene that was read behind the legend carries both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple, Protocol

from looseleaf.workloads.masks import fonts
from looseleaf.workloads.pictures import Picture

Size = tuple[int, int]
"""Height and width in pixels, or rows and columns."""

LETTERS = "ABCDEFGHKLMNPRSTUVWXYZ"
"""Capitals that no digit looks like."""

NOT_SHOWN = "not shown"
"""The answer where the pictures have none."""


class Fact(NamedTuple):
    """One entry of a form: a key, which is given, and a value, which is asked for."""

    key: str
    value: str
    carriers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """One question about the pictures of an album; `needs` and `carriers` count them from 0."""

    task: str
    kind: str
    text: str
    answer: str
    hops: int
    needs: tuple[int, ...]
    carriers: tuple[int, ...]
    facts: tuple[Fact, ...] = ()
    """A form's entries; none in a plain question."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """What may be drawn. Two splits never share a seed, whatever number they are given."""

    name: str
    fonts: tuple[int, ...]
    grids: tuple[Size, ...]
    held_wordings: bool
    most_lines: int = 99
    """Lines of a page and entries of a legend, at most."""

    def chance(self, *seed: object) -> Random:
        """Random numbers of this split alone."""
        return Random("/".join([self.name, *map(str, seed)]))


_HELD_GRIDS: tuple[Size, ...] = ((3, 4), (4, 2))
_GRIDS: tuple[Size, ...] = tuple(
    (rows, columns) for rows in (2, 3, 4) for columns in (2, 3, 4) if (rows, columns) not in _HELD_GRIDS
)


def trained() -> Split:
    """What training draws from."""
    return Split(
        name="trained",
        fonts=fonts()[0],
        grids=_GRIDS,
        held_wordings=False,
    )


def first_steps() -> tuple[Split, Split]:
    """What training begins with: a few shapes or lines a picture, then some more. Reading comes before finding."""
    whole = trained()
    return (
        replace(whole, grids=((1, 2), (2, 1), (2, 2), (2, 3), (3, 2)), most_lines=5),
        replace(whole, grids=((2, 2), (2, 3), (3, 2), (3, 3), (2, 4)), most_lines=7),
    )


def held_out() -> Split:
    """What figures are reported on: other seeds, grids and wordings; the fonts are known."""
    return Split(
        name="held-out",
        fonts=fonts()[0],
        grids=_HELD_GRIDS,
        held_wordings=True,
    )


def held_out_fonts() -> Split:
    """The same in fonts training never saw."""
    return replace(held_out(), name="held-out fonts", fonts=fonts()[1])


@dataclass(frozen=True, slots=True)
class Phrases:
    """Wordings of one question as format strings; the held ones are never trained on."""

    usual: tuple[str, ...]
    held: tuple[str, ...]

    def pick(self, chance: Random, split: Split) -> str:
        return chance.choice(self.held if split.held_wordings else self.usual)


def form(
    task: str, kind: str, text: str, hops: int, needs: Sequence[int], facts: list[Fact], chance: Random,
    *, again: bool = False,
) -> Question:  # fmt: skip
    """Many small questions for the price of one: `facts` in random order.

    With `again` some come twice and some not at all: values that are all different could be told by elimination, and
    nothing would be looked up.
    """
    facts = chance.choices(facts, k=len(facts) + 2) if again else chance.sample(facts, len(facts))
    answer = ", ".join(f"{fact.key} {fact.value}" for fact in facts)
    carriers = sorted({one for fact in facts for one in fact.carriers})
    return Question(task, kind, text, answer, hops, tuple(needs), tuple(carriers), tuple(facts))


class World(Protocol):
    """Some pictures that belong together, in an order that matters, and what can be asked about them."""

    kinds: dict[str, float]
    """What `ask` takes here, with how often training asks it."""
    absorbed: list[int]
    """Pictures that later ones of this world were read behind: a question can do without them."""

    @property
    def pictures(self) -> Sequence[Picture]:
        """In the order that matters."""
        ...

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        """A question of that kind; `needs` counts this world's own pictures."""
        ...


ROWS = "ABCDEFG"


def cell_name(at: int, columns: int) -> str:
    """As on a chessboard turned round: the row's letter, the column's number."""
    return f"{ROWS[at // columns]}{at % columns + 1}"


PICTURES = Phrases(
    usual=(
        "picture {tag}",
        "image {tag}",
        "the picture marked {tag}",
        "the image {tag}",
        "the image with the mark {tag}",
    ),
    held=("the image marked {tag}",),
)
