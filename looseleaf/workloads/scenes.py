"""Tasks a and b: grids of coloured shapes, a legend that gives shapes a code, scenes of which a later version differs.

Every picture carries its letter in the corner, so that a question can name it wherever it stands in a prompt. A scene's
later version carries the letter with a 2, the earlier one with a 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from looseleaf.workloads.masks import SHAPES
from looseleaf.workloads.pictures import COLOURS, Picture, blank
from looseleaf.workloads.questions import (
    NOT_SHOWN,
    PICTURES,
    ROWS,
    Fact,
    Phrases,
    Question,
    Size,
    Split,
    cell_name,
    form,
)

Cell = tuple[str, str]
"""A shape and its colour."""

TAG_HEIGHT, SIDE_WIDTH = 28, 46
"""Room for a picture's letter, and for the letters of rows and the numbers of columns: a vision tower that knows no
absolute positions (Qwen2.5-VL's) could not tell them otherwise."""

LEAST_PITCH = 27
"""From one shape to the next: the smallest are 26 wide."""

_AT = Phrases(
    usual=(
        "What {what} is at {cell} of {picture}?", "Which {what} does {picture} show at {cell}?",
        "In {picture}, what is the {what} at {cell}?", "Tell me the {what} at {cell} in {picture}.",
        "Which {what} is at {cell} of {picture}?", "What {what} does {picture} have at {cell}?",
        "Look at {cell} of {picture}: which {what} is it?", "At {cell} of {picture}, what {what} is there?",
        "I need the {what} at {cell} of {picture}.", "{picture}, {cell}: which {what}?",
        "Say which {what} {picture} has at {cell}.", "Give me the {what} that is at {cell} in {picture}.",
    ),
    held=("What is the {what} at {cell} of {picture}?", "In {picture}, which {what} is at {cell}?"),
)  # fmt: skip
_LEGEND = Phrases(
    usual=(
        "Which code does the key give the {shape}?", "What is the code of the {shape}?",
        "Tell me the code of the {shape}.", "By the key, which code does the {shape} have?",
        "What code does the key have for the {shape}?", "The {shape} has which code?",
        "I need the code of the {shape}.", "Look at the key: what is the code of the {shape}?",
        "Which code belongs to the {shape}?", "Say which code the {shape} has.",
    ),
    held=("Which code has the {shape}?", "By the key, what is the code of the {shape}?"),
)  # fmt: skip
_LEGEND_CELL = Phrases(
    usual=("Which code does the key show at {cell}?", "What is the code at {cell} of the key?",
           "Tell me the code at {cell} of the key.", "What code is at {cell} of the key?",
           "In the key, which code is at {cell}?"),
    held=("Which code is at {cell} of the key?",),
)  # fmt: skip
_TAG = Phrases(
    usual=("Which picture shows a {thing} at {cell}?", "In which image is a {thing} at {cell}?",
           "Tell me the picture with a {thing} at {cell}.", "Which image has a {thing} at {cell}?",
           "In which picture do you see a {thing} at {cell}?", "A {thing} is at {cell} of which picture?"),
    held=("In which picture is a {thing} at {cell}?",),
)  # fmt: skip
_COLOUR_OF = Phrases(
    usual=("What colour is the {shape} in {picture}?", "Which colour does the {shape} of {picture} have?",
           "In {picture}, what is the colour of the {shape}?", "Tell me the colour of the {shape} in {picture}.",
           "In {picture}, what colour is the {shape}?", "Which colour is the {shape} of {picture}?"),
    held=("In {picture}, which colour does the {shape} have?",),
)  # fmt: skip
_WHERE = Phrases(
    usual=("Where in {picture} is the {thing}?", "In {picture}, where is the {thing}?",
           "Tell me the cell of {picture} with the {thing}.", "Which cell of {picture} shows the {thing}?",
           "Where is the {thing} of {picture}?", "Say where in {picture} the {thing} is."),
    held=("Tell me where the {thing} is in {picture}.",),
)  # fmt: skip
_CHANGED = Phrases(
    usual=(
        "Which cell changed between {before} and {after}?", "Which cell of {after} is not as in {before}?",
        "Where do {before} and {after} differ?", "Tell me the cell that changed from {before} to {after}.",
        "Where is {after} not as {before}?", "In which cell do {before} and {after} differ?",
        "From {before} to {after}, which cell changed?", "Which cell is new in {after}, compared with {before}?",
        "Tell me which cell of {after} changed since {before}.", "Where did {before} change to become {after}?",
        "Compare {before} with {after}: which cell is not the same?", "Say where {after} differs from {before}.",
    ),
    held=("Which cell changed from {before} to {after}?", "Tell me where {before} and {after} differ."),
)  # fmt: skip
_CHANGED_TO = Phrases(
    usual=(
        "What is new in {after}, compared with {before}?", "What does the changed cell of {after} show?",
        "One cell changed from {before} to {after}: what is it now?", "What did {after} get that {before} has not?",
        "What does {after} have that {before} has not?", "What is in {after} that was not in {before}?",
        "Which thing of {after} is new since {before}?", "What is new in {after}, and was not in {before}?",
        "Compare {before} with {after}: what is new?", "What does {after} show in the cell that changed?",
        "Tell me what is new in {after} since {before}.", "What is it that {after} has and {before} has not?",
        "From {before} to {after}, what is new?", "Say what the cell of {after} that changed shows.",
    ),
    held=("What is new in {after} that {before} has not?", "What does the cell that changed in {after} show?"),
)  # fmt: skip
_FORM = Phrases(usual=("Fill in the {what} of each cell of {picture}.", "Give each cell of {picture} its {what}."),
                held=("Fill in each cell of {picture} and its {what}.",))  # fmt: skip
_FORM_THINGS = Phrases(usual=("Fill in the cell of each thing of {picture}.", "Give each thing of {picture} its cell."),
                       held=("Fill in each thing of {picture} and its cell.",))  # fmt: skip
_FORM_TAGS = Phrases(usual=("Fill in the picture of each thing.", "Give each thing its picture."),
                     held=("Fill in each thing and its picture.",))  # fmt: skip
_FORM_KEY = Phrases(usual=("Fill in each cell of the key.", "Give each cell of the key its shape and code."),
                    held=("Fill in each cell of the key, shape and code.",))  # fmt: skip
_FORM_LEGEND = Phrases(usual=("Fill in the code of each shape.", "Give each shape its code."),
                       held=("Fill in each shape and its code.",))  # fmt: skip
_FORM_CHANGES = Phrases(usual=("Compare {after} with {before}, cell by cell.",
                               "Is each cell of {after} as in {before}?"),
                        held=("Compare each cell of {after} with {before}.",))  # fmt: skip


@dataclass(slots=True)
class Scene:
    """One grid: its letter, its cells row by row, and the place of its picture in the world."""

    tag: str
    rows: int
    columns: int
    cells: list[Cell]
    place: int

    def shows(self, cell: str, thing: Cell) -> bool:
        """Whether `thing` is at the cell of that name."""
        return any(one == thing and cell_name(at, self.columns) == cell for at, one in enumerate(self.cells))


class Scenes:
    """A legend, or none, and scenes behind it, some of them in two versions."""

    def __init__(self, chance: Random, split: Split, size: Size, *, count: int, legend: bool, pairs: int) -> None:
        """`count` pictures of `size`, legend and later versions included; `pairs` scenes have two versions."""
        self.pictures: list[Picture] = []
        self._size, self._font = size, chance.choice(split.fonts)
        self._tags = chance.sample("HJKLMNPRSTUVWXYZ", 8)
        self._legend_columns = 2 if size[1] < 190 else 3
        fit = self._legend_columns * ((size[0] - TAG_HEIGHT - 2) // LEAST_PITCH)
        shapes = chance.sample(SHAPES, min(split.most_lines, fit, chance.randint(7, 12)) if legend else 12)
        self.codes = {shape: str(chance.randrange(10)) for shape in shapes} if legend else {}
        if legend:
            self._draw_legend(chance)
        self.scenes: list[Scene] = []
        self.changes: list[tuple[Scene, Scene, list[int]]] = []
        singles = count - len(self.pictures) - 2 * pairs
        for number in range(pairs + singles):
            self._add_scene(chance, split, list(shapes), twice=number < pairs)
        self.absorbed = [0] * legend + [before.place for before, _, _ in self.changes]
        self.kinds = {"colour": 1.0, "shape": 1.0, "tag": 1.0, "colour_of": 1.0, "where": 1.0}
        self.kinds |= {"form_cells": 5.0, "form_things": 2.0, "form_tags": 1.0}
        if not self.scenes:
            self.kinds = {}
        elif legend:
            self.kinds |= {"code": 3.0, "form_codes": 8.0}
        else:
            self.kinds["no_code"] = 0.4
        if legend:
            self.kinds |= {"legend": 1.5, "legend_cell": 1.0, "form_legend": 3.0, "form_key": 2.0}
        if self.changes:
            self.kinds["form_changes"] = 5.0
        if any(len(places) == 1 for _, _, places in self.changes):
            self.kinds |= {"changed_cell": 2.0, "changed_to": 2.0}

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        if kind in ("legend", "legend_cell", "form_legend", "form_key"):
            return self._ask_legend(kind, chance, split)
        if kind in ("tag", "colour_of", "where"):
            return self._ask_thing(kind, chance, split)
        if kind in ("changed_cell", "changed_to", "form_changes"):
            return self._ask_change(kind, chance, split)
        if kind.startswith("form_"):
            return self._form(kind, chance, split)
        scene = chance.choice(self.scenes)
        picture = PICTURES.pick(chance, split).format(tag=scene.tag)
        at = chance.randrange(len(scene.cells))
        cell = cell_name(at, scene.columns)
        text = _AT.pick(chance, split).format(picture=picture, cell=cell, what=kind.removeprefix("no_"))
        shape, colour = scene.cells[at]
        answer = {"colour": colour, "shape": shape, "code": self.codes.get(shape, ""), "no_code": NOT_SHOWN}[kind]
        if kind == "code":
            return Question("legend", kind, text, answer, 2, (0, scene.place), (scene.place,))
        return Question("legend", kind, text, answer, 1, (scene.place,), (scene.place,))

    def _form(self, kind: str, chance: Random, split: Split) -> Question:
        """Cells of one picture, or of several, each then with its picture's letter."""
        several = len(self.scenes) > 1 and (kind == "form_tags" or chance.random() < 0.5)
        chosen = self.scenes if several else [chance.choice(self.scenes)]
        facts: list[Fact] = []
        for scene in chosen:
            for at, (shape, colour) in enumerate(scene.cells):
                cell = cell_name(at, scene.columns)
                key = f"{scene.tag} {cell}" if several else cell
                if kind == "form_tags":
                    if sum(other.shows(cell, (shape, colour)) for other in self.scenes) == 1:
                        facts.append(Fact(f"{cell} {colour} {shape}", scene.tag, (scene.place,)))
                elif kind == "form_things":
                    if scene.cells.count((shape, colour)) == 1:
                        thing = f"{scene.tag} {colour} {shape}" if several else f"{colour} {shape}"
                        facts.append(Fact(thing, cell, (scene.place,)))
                else:
                    value = f"{colour} {shape}" if kind == "form_cells" else self.codes[shape]
                    facts.append(Fact(key, value, (scene.place,)))
        if not facts:
            return self._form("form_cells", chance, split)
        picture = "all pictures" if several else PICTURES.pick(chance, split).format(tag=chosen[0].tag)
        coded = kind == "form_codes"
        wording = {"form_things": _FORM_THINGS, "form_tags": _FORM_TAGS}.get(kind, _FORM).pick(chance, split)
        text = wording.format(what="code" if coded else "thing", picture=picture)
        needs = [0] * coded + [scene.place for scene in chosen]
        return form("legend", kind, text, 1 + coded, needs, facts, chance)

    def _ask_legend(self, kind: str, chance: Random, split: Split) -> Question:
        if kind == "form_legend":
            facts = [Fact(shape, code, (0,)) for shape, code in self.codes.items()]
            return form("legend", kind, _FORM_LEGEND.pick(chance, split), 1, (0,), facts, chance)
        if kind == "form_key":
            facts = [
                Fact(cell_name(at, self._legend_columns), f"{shape} {code}", (0,))
                for at, (shape, code) in enumerate(self.codes.items())
            ]
            return form("legend", kind, _FORM_KEY.pick(chance, split), 1, (0,), facts, chance)
        at = chance.randrange(len(self.codes))
        shape, code = list(self.codes.items())[at]
        if kind == "legend_cell":
            cell = cell_name(at, self._legend_columns)
            return Question("legend", kind, _LEGEND_CELL.pick(chance, split).format(cell=cell), code, 1, (0,), (0,))
        return Question("legend", kind, _LEGEND.pick(chance, split).format(shape=shape), code, 1, (0,), (0,))

    def _ask_thing(self, kind: str, chance: Random, split: Split) -> Question:
        """A question that finds something by its looks; where nothing is the only one of its kind, one by its place."""
        scene = chance.choice(self.scenes)
        at = chance.randrange(len(scene.cells))
        shape, colour = scene.cells[at]
        cell = cell_name(at, scene.columns)
        rivals = {
            "tag": sum(other.shows(cell, scene.cells[at]) for other in self.scenes),
            "colour_of": sum(other == shape for other, _ in scene.cells),
            "where": scene.cells.count(scene.cells[at]),
        }[kind]
        if rivals > 1:
            return self.ask("colour", chance, split)
        picture = PICTURES.pick(chance, split).format(tag=scene.tag)
        phrases = {"tag": _TAG, "colour_of": _COLOUR_OF, "where": _WHERE}[kind]
        words = {"picture": picture, "cell": cell, "shape": shape, "thing": f"{colour} {shape}"}
        answer = {"tag": scene.tag, "colour_of": colour, "where": cell}[kind]
        text = phrases.pick(chance, split).format(**words)
        return Question("legend", kind, text, answer, 1, (scene.place,), (scene.place,))

    def _ask_change(self, kind: str, chance: Random, split: Split) -> Question:
        single = [change for change in self.changes if len(change[2]) == 1]
        before, after, places = chance.choice(self.changes if kind == "form_changes" else single)
        wording = PICTURES.pick(chance, split)
        names = {"before": wording.format(tag=before.tag), "after": wording.format(tag=after.tag)}
        needs, carriers = (before.place, after.place), (after.place,)
        if kind == "form_changes":
            text = _FORM_CHANGES.pick(chance, split).format(**names)
            same = [at for at in range(len(after.cells)) if at not in places]
            facts = [
                Fact(cell_name(at, after.columns), "new" if at in places else "same", carriers)
                for at in [*places, *chance.sample(same, min(len(same), 2 + len(places)))]
            ]
            return form("change", kind, text, 2, needs, facts, chance)
        at = places[0]
        if kind == "changed_cell":
            text, answer = _CHANGED.pick(chance, split), cell_name(at, after.columns)
        else:
            text, answer = _CHANGED_TO.pick(chance, split), " ".join(reversed(after.cells[at]))
        return Question("change", kind, text.format(**names), answer, 2, needs, carriers)

    def _add_scene(self, chance: Random, split: Split, shapes: list[str], *, twice: bool) -> None:
        height, width = self._size
        fit = [
            (rows, columns) for rows, columns in split.grids
            if rows * LEAST_PITCH <= height - TAG_HEIGHT - 2 and columns * LEAST_PITCH <= width - SIDE_WIDTH
        ]  # fmt: skip
        rows, columns = chance.choice(fit)
        cells = [(chance.choice(shapes), chance.choice(list(COLOURS))) for _ in range(rows * columns)]
        tag, look = self._tags.pop(), chance.getrandbits(32)
        first = Scene(f"{tag}1" if twice else tag, rows, columns, cells, len(self.pictures))
        self._draw_scene(Random(look), first)
        if not twice:
            return
        several = chance.randint(2, max(2, len(cells) // 2))
        places = sorted(chance.sample(range(len(cells)), 1 if chance.random() < 0.6 else several))
        later = list(cells)
        for at in places:
            while later[at] == cells[at]:
                shape, colour = cells[at]
                what = chance.random()
                shape = chance.choice(shapes) if what < 0.7 else shape
                colour = chance.choice(list(COLOURS)) if what > 0.4 else colour
                later[at] = (shape, colour)
        second = Scene(f"{tag}2", rows, columns, later, len(self.pictures))
        self._draw_scene(Random(look), second)
        self.changes.append((first, second, places))

    def _draw_scene(self, chance: Random, scene: Scene) -> None:
        height, width = self._size
        sheet = blank(chance, width, height)
        sheet.write(scene.tag, 3 + chance.randrange(6), chance.randrange(3), self._font, 2)
        pitch = min(56, (width - SIDE_WIDTH) // scene.columns, (height - TAG_HEIGHT - 2) // scene.rows)
        size = 2 if pitch >= 46 else 1 if pitch >= 36 else 0
        left = SIDE_WIDTH + chance.randrange(max(1, min(24, width - SIDE_WIDTH - pitch * scene.columns)))
        top = TAG_HEIGHT + chance.randrange(max(1, min(16, height - TAG_HEIGHT - 2 - pitch * scene.rows)))
        for column in range(scene.columns):
            sheet.write(str(column + 1), left + pitch * column + pitch // 2 - 6, top - 26, self._font, 0)
        for row in range(scene.rows):
            sheet.write(ROWS[row], left - 16, top + pitch * row + pitch // 2 - 15, self._font, 0)
        for at, (shape, colour) in enumerate(scene.cells):
            row, column = divmod(at, scene.columns)
            middle = (left + pitch * column + pitch // 2, top + pitch * row + pitch // 2)
            sheet.shape(shape, COLOURS[colour], *middle, size)
        self.scenes.append(scene)
        self.pictures.append(sheet.finish())

    def _draw_legend(self, chance: Random) -> None:
        height, width = self._size
        sheet = blank(chance, width, height)
        sheet.write(self._tags.pop(), 3 + chance.randrange(6), chance.randrange(3), self._font, 2)
        columns = self._legend_columns
        rows = -(-len(self.codes) // columns)
        wide, high = min(68, (width - SIDE_WIDTH) // columns), min(50, (height - TAG_HEIGHT - 2) // rows)
        size = 1 if wide >= 56 and high >= 36 else 0
        reach = (30, 37)[size]
        left, top = SIDE_WIDTH - chance.randrange(6), TAG_HEIGHT
        for column in range(min(columns, len(self.codes))):
            sheet.write(str(column + 1), left + wide * column + reach // 2 - 6, top - 26, self._font, 0)
        for row in range(rows):
            sheet.write(ROWS[row], left - 18, top + high * row + high // 2 - 15, self._font, 0)
        for at, (shape, code) in enumerate(self.codes.items()):
            row, column = divmod(at, columns)
            x, y = left + wide * column, top + high * row + high // 2
            sheet.shape(shape, sheet.ink, x + reach // 2 - 1, y, size)
            sheet.write(code, x + reach - 1, y - 14, self._font, 2)
        self.pictures.append(sheet.finish())
