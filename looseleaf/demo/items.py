"""What the demo asks: held-out albums, questions about them, and the places their images are moved to.

Only prompts are made here; nothing is asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from looseleaf.prompt.segments import Message, PromptLike, Segment
from looseleaf.training.prompts import HARMLESS
from looseleaf.workloads.albums import HEADLINE, as_segment, task_album
from looseleaf.workloads.bounds import Bounds
from looseleaf.workloads.questions import Question, Size, held_out

TIMED = ("clip", "stream")
"""Tasks whose images have an order in time: they move, and stay in order."""

WORDS = "I took these this morning. Please look at them one by one and take your time. "
EARLIER_TURN = (
    Message("user", ("Hello! I will show you some pictures and then ask about them.",)),
    Message("assistant", (HARMLESS,)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One question about the images of an album."""

    task: str
    images: tuple[Segment, ...]
    question: Question

    def in_place(self) -> PromptLike:
        """The images from the start of the prompt on, then the question."""
        return [*self.images, self.question.text]

    def moved(self) -> dict[str, PromptLike]:
        """The same question with the images elsewhere: behind other words, in a later turn, in another order."""
        apart = [part for image in self.images for part in (image, " and ")][:-1]
        places: dict[str, PromptLike] = {
            "other words": [WORDS, *apart, self.question.text],
            "a later turn": [*EARLIER_TURN, Message("user", (*self.images, self.question.text))],
        }
        order = self._other_order()
        if self.task not in TIMED and order[0] != 0:
            places["another order"] = [*(self.images[at] for at in order), self.question.text]
        return places

    def _other_order(self) -> list[int]:
        """The other images backwards, then those the question needs as they were: `before` stands before `after`."""
        needs = sorted(self.question.needs)
        return [at for at in reversed(range(len(self.images))) if at not in needs] + needs


def draw_albums(task: str, bounds: Bounds, seed: int) -> Iterator[tuple[Item, ...]]:
    """Held-out albums without end, each with one item for every headline kind of question, single-hop ones first."""
    split = held_out()
    for number in itertools.count():
        chance = split.chance("demo", task, seed, number)
        size: Size = (bounds.frame_side, bounds.frame_side) if task in TIMED else chance.choice(bounds.sizes)
        album = task_album(task, chance, split, size, chance.choice(bounds.counts_of(task)))
        kinds = album.worlds[0].kinds
        if not all(set(kinds) & set(some) for some in HEADLINE[task]):
            continue  # in some albums nothing can be asked over two images
        images = tuple(as_segment(entry) for entry in album.entries)
        asked = [kind for some in HEADLINE[task] for kind in some if kind in kinds]
        yield tuple(
            Item(task=task, images=images, question=album.ask(0, kind, chance, split)) for kind in asked
        )  # fmt: skip
