"""Task e: streams of minutes to hours. Scenes come and return; now and then a sign is up for a moment: a needle.

A sign shows a coloured shape beside a number, or a coloured shape beside a letter while another sign gives that letter
its number: the second kind takes two hops. The evidence of every question is known to the frame. Frames are drawn when
asked for, so that a stream of hours costs nothing to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import overload

from looseleaf.workloads.masks import SHAPES
from looseleaf.workloads.pictures import COLOURS, Picture, blank
from looseleaf.workloads.questions import LETTERS, Fact, Phrases, Question, Split, form

_NUMBER = Phrases(
    usual=("What number was on the sign with the {what}?", "Which number did the sign with the {what} show?",
           "Tell me the number beside the {what}.", "Which number belongs to the {what}?",
           "What number did you see with the {what}?", "The sign with the {what} had which number?",
           "Which number stood beside the {what}?", "Say which number was with the {what}."),
    held=("Which number was beside the {what}?", "Tell me the number on the sign with the {what}."),
)  # fmt: skip
_FORM = Phrases(usual=("Fill in the {what} of each sign.", "Give each sign its {what}."),
                held=("Fill in each sign and its {what}.",))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sign:
    """What one frame showed: `left` is a coloured shape or a letter, `right` a number or a letter."""

    frame: int
    left: str
    right: str


class Stream:
    """`frames` pictures of `side` pixels; `needles` numbers can be asked for, a share of them over two signs."""

    def __init__(
        self, chance: Random, split: Split, side: int, *, frames: int, needles: int, run: tuple[int, int] = (3, 10)
    ) -> None:
        self._seed = chance.getrandbits(64)
        self.side, self._font, self._split = side, chance.choice(split.fonts), split
        scenes = [self._scene(chance) for _ in range(max(2, frames // 12))]
        self._scenes = scenes
        self._scene_of: list[int] = []
        while len(self._scene_of) < frames:
            self._scene_of += [chance.randrange(len(scenes))] * chance.randint(*run)
        del self._scene_of[frames:]
        self.signs: dict[int, Sign] = {}
        self.chains: list[tuple[Sign, Sign | None, str]] = []
        """The sign a question names, the sign it leads to if any, and the number."""
        self._place_signs(chance, frames, needles)
        self.pictures: Sequence[Picture] = _Frames(self)
        self.absorbed: list[int] = []
        self.kinds = {"form_signs": 4.0}
        if any(second is None for _, second, _ in self.chains):
            self.kinds["sign"] = 3.0
        if any(second is not None for _, second, _ in self.chains):
            self.kinds |= {"sign_chain": 3.0, "form_chains": 4.0}

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        if kind == "form_signs":
            text = _FORM.pick(chance, split).format(what="right side")
            facts = [Fact(sign.left, sign.right, (sign.frame,)) for sign in self.signs.values()]
            return form("stream", kind, text, 1, sorted(self.signs), facts, chance, again=True)
        if kind == "form_chains":
            text = _FORM.pick(chance, split).format(what="number")
            facts = [
                Fact(one.left, number, (one.frame, *([two.frame] if two else []))) for one, two, number in self.chains
            ]
            return form("stream", kind, text, 2, sorted(self.signs), facts, chance, again=True)
        chained = kind == "sign_chain"
        first, second, number = chance.choice([one for one in self.chains if (one[1] is not None) == chained])
        needs = (first.frame,) if second is None else tuple(sorted((first.frame, second.frame)))
        text = _NUMBER.pick(chance, split).format(what=first.left)
        return Question("stream", kind, text, number, 2 if chained else 1, needs, needs)

    def picture(self, frame: int) -> Picture:
        """Draw one frame."""
        scene = self._scene_of[frame]
        side = self.side
        sheet = blank(Random(self._seed + scene), side, side)
        pitch, size = side // 2, 2 if side >= 100 else 1
        sign = self.signs.get(frame)
        row = (self._seed + frame) % 2
        for at, (shape, colour) in enumerate(self._scenes[scene]):
            if sign is None or at // 2 != row:
                middle = (pitch * (at % 2) + pitch // 2, pitch * (at // 2) + pitch // 2)
                sheet.shape(shape, COLOURS[colour], *middle, size)
        if sign is not None:
            y = pitch * row + pitch // 2
            if " " in sign.left:
                colour, shape = sign.left.split()
                sheet.shape(shape, COLOURS[colour], pitch // 2, y, size)
            else:
                sheet.write(sign.left, pitch // 2 - 8, y - 14, self._font, 2)
            sheet.write(sign.right, pitch + pitch // 2 - 14, y - 14, self._font, 2)
        return sheet.finish()

    def _scene(self, chance: Random) -> list[tuple[str, str]]:
        return [(chance.choice(SHAPES), chance.choice(list(COLOURS))) for _ in range(4)]

    def _place_signs(self, chance: Random, frames: int, needles: int) -> None:
        things = chance.sample([f"{colour} {shape}" for colour in COLOURS for shape in SHAPES], needles)
        letters = chance.sample(LETTERS, min(needles, len(LETTERS)))
        free = chance.sample(range(frames), frames)
        for thing in things:
            number = str(chance.randrange(10, 100))
            chained = len(free) >= 2 and bool(letters) and chance.random() < 0.4
            if chained:
                letter, (early, late) = letters.pop(), sorted((free.pop(), free.pop()))
                first, second = Sign(early, thing, letter), Sign(late, letter, number)
                self.signs |= {early: first, late: second}
                self.chains.append((first, second, number))
            elif free:
                first = Sign(free.pop(), thing, number)
                self.signs[first.frame] = first
                self.chains.append((first, None, number))


class _Frames(Sequence[Picture]):
    """A stream's pictures, drawn when read."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __len__(self) -> int:
        return len(self._stream._scene_of)

    @overload
    def __getitem__(self, at: int) -> Picture: ...
    @overload
    def __getitem__(self, at: slice) -> list[Picture]: ...
    def __getitem__(self, at: int | slice) -> Picture | list[Picture]:
        places = range(len(self))[at]
        return self._stream.picture(places) if isinstance(places, int) else [self._stream.picture(p) for p in places]
