"""Task c: two pages. The first gives names an id, the second gives ids a value; some questions need both.

The same facts can be had as text instead of pictures: the negative control, since words bind to each other less.
"""

from __future__ import annotations

from random import Random

from looseleaf.workloads.pictures import Picture, blank
from looseleaf.workloads.questions import LETTERS, NOT_SHOWN, Fact, Phrases, Question, Size, Split, form

NAMES = (
    "Anna", "Ben", "Carl", "Dora", "Emil", "Fay", "Gus", "Hugo", "Ida", "Jack", "Kim", "Leo", "Mia", "Noah", "Olga",
    "Paul", "Quinn", "Rosa", "Sam", "Tina", "Uma", "Vera", "Walt", "Xena", "Yuri", "Zoe", "Amir", "Bela", "Cleo",
    "Dave", "Eva", "Finn",
)  # fmt: skip
FIRST_FIELDS = ("badge", "desk", "ticket", "locker")
SECOND_FIELDS = ("room", "gate", "price", "score")

_FIELD_OF = Phrases(
    usual=(
        "Which {field} does {owner} have?", "What {field} does {owner} have?", "What is the {field} of {owner}?",
        "Tell me the {field} of {owner}.", "Please tell me the {field} of {owner}.",
        "Which {field} belongs to {owner}?", "Give me the {field} of {owner}.",
        "Say which {field} {owner} has.", "Which {field} has {owner}?",
        "I want to know which {field} {owner} has.", "{owner} has which {field}?", "I need the {field} of {owner}.",
        "For {owner}, which is the {field}?", "Look up the {field} of {owner}.", "The {field} of {owner} is what?",
        "Do you know which {field} belongs to {owner}?", "Find the {field} that {owner} has.",
    ),
    held=("Which is the {field} of {owner}?", "Tell me which {field} {owner} has."),
)  # fmt: skip
_LINE = Phrases(
    usual=("Read line {line} of the page with the {field}.", "What is on line {line} of the page with the {field}?"),
    held=("What does line {line} of the page with the {field} show?",),
)
_FORM_LINES = Phrases(usual=("Read each line of the page with the {field}.",
                             "What is on each line of the page with the {field}?"),
                      held=("Read what each line of the page with the {field} is.",))  # fmt: skip
_FORM = Phrases(usual=("Fill in the {field} of each {owner}.", "Give each {owner} its {field}."),
                held=("Fill in each {owner} and its {field}.",))  # fmt: skip


class Documents:
    """Page 1: name and id. Page 2: id and value, in another order."""

    def __init__(self, chance: Random, split: Split, size: Size) -> None:
        height, _ = size
        most = min(7, (height - 34) // 26, split.most_lines)
        count = chance.randint(max(1, min(3, most), most - 2), most)
        ids: dict[str, None] = {}
        while len(ids) < count:
            ids[chance.choice(LETTERS) + str(chance.randrange(10))] = None
        names = chance.sample(NAMES, count + 4)
        self.absent = names[count:]
        self.first, self.second = chance.choice(FIRST_FIELDS), chance.choice(SECOND_FIELDS)
        self.id_of = dict(zip(names, ids, strict=False))
        shuffled = list(ids)
        chance.shuffle(shuffled)
        self.value_of = {one: str(chance.randrange(10, 100)) for one in shuffled}
        font = chance.choice(split.fonts)
        self.pictures: list[Picture] = [
            _draw_page(chance, size, font, ("name", self.first), list(self.id_of.items())),
            _draw_page(chance, size, font, (self.first, self.second), list(self.value_of.items())),
        ]
        self.absorbed = [0]
        self.kinds = {"line": 1.0, "id_of": 1.5, "value_of_id": 1.5, "value_of": 3.0, "no_name": 0.4}
        self.kinds |= {"form_lines": 2.0, "form_ids": 3.0, "form_values": 3.0, "form_matches": 6.0}

    def texts(self) -> tuple[str, str]:
        """The two pages as words."""
        heads = (f"name {self.first}", f"{self.first} {self.second}")
        bodies = (
            "".join(f"\n{line} {one} {other}" for line, (one, other) in enumerate(table.items(), 1))
            for table in (self.id_of, self.value_of)
        )
        first, second = (head + body + "\n" for head, body in zip(heads, bodies, strict=True))
        return first, second

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        words: dict[str, str] = {}
        name, one = chance.choice(list(self.id_of.items()))
        page = chance.randrange(2)
        match kind:
            case "line":
                line, (left, right) = chance.choice(list(enumerate((self.id_of, self.value_of)[page].items(), 1)))
                found, answer = _LINE, f"{left} {right}"
                words |= {"line": str(line), "field": ("name", self.second)[page]}
            case "id_of":
                found, answer = _FIELD_OF, one
                words |= {"field": self.first, "owner": name}
            case "value_of_id":
                found, answer = _FIELD_OF, self.value_of[one]
                words |= {"field": self.second, "owner": f"{self.first} {one}"}
            case "value_of":
                found, answer = _FIELD_OF, self.value_of[one]
                words |= {"field": self.second, "owner": name}
            case "no_name":
                found, answer = _FIELD_OF, NOT_SHOWN
                words |= {"field": (self.first, self.second)[page], "owner": chance.choice(self.absent)}
            case _:
                return self._form(kind, chance, split)
        text = found.pick(chance, split).format(**words)
        hops = 2 if kind == "value_of" else 1
        needs = {"line": (page,), "id_of": (0,), "value_of_id": (1,)}.get(kind, (0, 1))
        carriers = (1,) if hops == 2 else needs
        return Question("documents", kind, text, answer, hops, needs, carriers)

    def _form(self, kind: str, chance: Random, split: Split) -> Question:
        needs: tuple[int, ...]
        if kind == "form_lines":
            page = chance.randrange(2)
            lines = enumerate((self.id_of, self.value_of)[page].items(), 1)
            facts = [Fact(str(line), f"{one} {other}", (page,)) for line, (one, other) in lines]
            text = _FORM_LINES.pick(chance, split).format(field=("name", self.second)[page])
            return form("documents", kind, text, 1, (page,), facts, chance, again=True)
        if kind == "form_ids":
            owner, field, hops, needs, table = "name", self.first, 1, (0,), self.id_of
        elif kind == "form_values":
            owner, field, hops, needs, table = self.first, self.second, 1, (1,), self.value_of
        else:
            table = {name: self.value_of[one] for name, one in self.id_of.items()}
            owner, field, hops, needs = "name", self.second, 2, (0, 1)
        text = _FORM.pick(chance, split).format(owner=owner, field=field)
        facts = [Fact(key, value, needs[-1:]) for key, value in table.items()]
        return form("documents", kind, text, hops, needs, facts, chance, again=True)


def _draw_page(chance: Random, size: Size, font: int, heads: tuple[str, str], lines: list[tuple[str, str]]) -> Picture:
    height, width = size
    sheet = blank(chance, width, height)
    edge = 3 + chance.randrange(6)
    left = edge + 18
    middle = min(left + 82 + chance.randrange(14), width - 64)
    top = chance.randrange(4)
    sheet.write(heads[0], left, top, font, 0)
    sheet.write(heads[1], middle, top, font, 0)
    step = min(34, (height - 30 - top) // len(lines))
    size_of_letters = 2 if step >= 28 and chance.random() < 0.6 else 1
    for number, (one, other) in enumerate(lines):
        y = top + 26 + step * number
        sheet.write(str(number + 1), edge, y + 1, font, 0)
        sheet.write(one, left, y, font, size_of_letters)
        sheet.write(other, middle, y, font, size_of_letters)
    return sheet.finish()
