"""Plain reading: a note of a few lines in one font. What every other task with words in pictures rests on."""

from __future__ import annotations

from random import Random

from looseleaf.workloads.documents import FIRST_FIELDS, NAMES, SECOND_FIELDS
from looseleaf.workloads.pictures import Picture, blank
from looseleaf.workloads.questions import LETTERS, Fact, Phrases, Question, Size, Split, form

LINE_HEIGHT = 26

_READ = Phrases(usual=("Read the note.", "What does the note say?"), held=("What is on the note?",))
_FORM = Phrases(usual=("Read each line of the note.", "What is on each line of the note?"),
                held=("What does each line of the note say?",))  # fmt: skip


class Note:
    """Lines with their numbers, each a name, an id, a number, a letter or a word, or two of them."""

    def __init__(self, chance: Random, split: Split, size: Size) -> None:
        height, width = size
        count = chance.randint(1, max(1, min(6, split.most_lines, (height - 4) // LINE_HEIGHT)))
        font = chance.choice(split.fonts)
        letters = 2 if height // count >= 30 and chance.random() < 0.5 else chance.randrange(2)
        sheet = blank(chance, width, height)
        step = min(40, (height - 4) // count)
        spare = height - 4 - step * count
        top = 1 + chance.randrange(spare + 1)
        edge = 2 + chance.randrange(8)
        self.lines: list[str] = []
        for number in range(count):
            y = top + step * number
            sheet.write(str(number + 1), edge, y + 2, font, 0)
            words = [some_word(chance)]
            end = sheet.write(words[0], edge + 18 + chance.randrange(8), y, font, letters)
            if width - end > 76 and chance.random() < 0.5:
                words.append(some_word(chance))
                sheet.write(words[1], end + 12 + chance.randrange(8), y, font, letters)
            self.lines.append(" ".join(words))
        self.pictures: list[Picture] = [sheet.finish()]
        self.absorbed: list[int] = []
        self.kinds = {"note": 1.0, "form_note": 2.0}

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        if kind == "note":
            text = _READ.pick(chance, split)
            return Question("note", kind, text, ", ".join(self.lines), 1, (0,), (0,))
        facts = [Fact(str(number), line, (0,)) for number, line in enumerate(self.lines, 1)]
        return form("note", kind, _FORM.pick(chance, split), 1, (0,), facts, chance)


def some_word(chance: Random) -> str:
    """A name, a field, an id, a number or a letter."""
    match chance.randrange(6):
        case 0:
            return chance.choice(LETTERS)
        case 1:
            return str(chance.randrange(10, 100))
        case 2:
            return chance.choice(LETTERS) + str(chance.randrange(10))
        case 3:
            return chance.choice((*FIRST_FIELDS, *SECOND_FIELDS))
        case _:
            return chance.choice(NAMES)
