"""Tasks a and b: grids of coloured shapes, a legend that gives shapes a code, scenes of which a later version differs.

Every picture carries its letter in the corner, so that a question can name it wherever it stands in a prompt. A scene's
later version carries the letter with a 2, the earlier one with a 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from looseleaf.workloads.masks import SHAPES
from looseleaf.workloads.pictures import COLOURS, Picture, blank
from looseleaf.workloads.questions import CELLS, NOT_SHOWN, PICTURES, Phrases, Question, Size, Split

Cell = tuple[str, str]
"""A shape and its colour."""

TAG_HEIGHT, SIDE_WIDTH = 28, 46
"""Room for a picture's letter, and for the numbers of columns and rows: a vision tower that knows no absolute positions
(Qwen2.5-VL's) could not tell them otherwise."""

_AT = Phrases(
    usual=(
        "What {what} is at {cell} of {picture}?", "Which {what} does {picture} show at {cell}?",
        "In {picture}, what is the {what} at {cell}?", "Tell me the {what} at {cell} in {picture}.",
        "Which {what} is at {cell} of {picture}?",
    ),
    held=("What is the {what} at {cell} of {picture}?", "In {picture}, which {what} is at {cell}?"),
)  # fmt: skip
_LEGEND = Phrases(
    usual=(
        "Which code does the key give the {shape}?", "What is the code of the {shape}?",
        "Tell me the code of the {shape}.",
        "By the key, which code has the {shape}?",
    ),
    held=("Which code has the {shape}?", "By the key, what is the code of the {shape}?"),
)  # fmt: skip
_LEGEND_CELL = Phrases(
    usual=("Which code does the key show at {cell}?", "What is the code at {cell} of the key?",
           "Tell me the code at {cell} of the key."),
    held=("Which code is at {cell} of the key?",),
)  # fmt: skip
_TAG = Phrases(
    usual=("Which picture shows a {thing} at {cell}?", "In which image is a {thing} at {cell}?",
           "Tell me the picture with a {thing} at {cell}."),
    held=("In which picture is a {thing} at {cell}?",),
)  # fmt: skip
_COLOUR_OF = Phrases(
    usual=("What colour is the {shape} in {picture}?", "Which colour does the {shape} of {picture} have?",
           "In {picture}, what is the colour of the {shape}?"),
    held=("In {picture}, which colour does the {shape} have?",),
)  # fmt: skip
_WHERE = Phrases(
    usual=("Where in {picture} is the {thing}?", "In {picture}, where is the {thing}?",
           "Tell me the cell of {picture} with the {thing}."),
    held=("Tell me where the {thing} is in {picture}.",),
)  # fmt: skip
_CHANGED = Phrases(
    usual=(
        "Which cell changed between {before} and {after}?", "Which cell of {after} is not as in {before}?",
        "Where do {before} and {after} differ?", "Tell me the cell that changed from {before} to {after}.",
    ),
    held=("Which cell changed from {before} to {after}?", "Tell me where {before} and {after} differ."),
)  # fmt: skip
_CHANGED_TO = Phrases(
    usual=(
        "What is new in {after}, compared with {before}?", "What does the changed cell of {after} show?",
        "One cell changed from {before} to {after}: what is it now?", "What did {after} get that {before} has not?",
    ),
    held=("What is new in {after} that {before} has not?", "What does the cell that changed in {after} show?"),
)  # fmt: skip
_LIST = Phrases(usual=("List the {what}s of {picture}.", "Give all {what}s of {picture}, row by row."),
                held=("List all {what}s of {picture}.",))  # fmt: skip
_LIST_LEGEND = Phrases(usual=("Read the key.", "List all codes of the key."), held=("List the codes of the key.",))
_LIST_CHANGES = Phrases(usual=("Compare {after} with {before}, cell by cell.",
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


class Scenes:
    """A legend, or none, and scenes behind it, some of them in two versions."""

    def __init__(self, chance: Random, split: Split, size: Size, *, count: int, legend: bool, pairs: int) -> None:
        """`count` pictures of `size`, legend and later versions included; `pairs` scenes have two versions."""
        self.pictures: list[Picture] = []
        self._size, self._font = size, chance.choice(split.fonts)
        self._tags = chance.sample("ABCDEFGHJKLMNPRSTUVWXYZ", 8)
        shapes = chance.sample(SHAPES, min(split.most_lines, chance.randint(7, 12)) if legend else 12)
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
        self.kinds |= {"list_colours": 1.0, "list_shapes": 1.5}
        if not self.scenes:
            self.kinds = {}
        elif legend:
            self.kinds |= {"code": 3.0, "list_codes": 5.0}
        else:
            self.kinds["no_code"] = 0.4
        if legend:
            self.kinds |= {"legend": 1.5, "legend_cell": 1.0, "list_legend": 1.5}
        if self.changes:
            self.kinds["list_changes"] = 3.0
        if any(len(places) == 1 for _, _, places in self.changes):
            self.kinds |= {"changed_cell": 2.0, "changed_to": 2.0}

    def ask(self, kind: str, chance: Random, split: Split) -> Question:
        if kind in ("legend", "legend_cell", "list_legend"):
            return self._ask_legend(kind, chance, split)
        if kind in ("tag", "colour_of", "where"):
            return self._ask_thing(kind, chance, split)
        if kind in ("changed_cell", "changed_to", "list_changes"):
            return self._ask_change(kind, chance, split)
        scene = chance.choice(self.scenes)
        picture = PICTURES.pick(chance, split).format(tag=scene.tag)
        if kind.startswith("list_"):
            text = _LIST.pick(chance, split).format(picture=picture, what=kind[len("list_") : -1])
            values = {
                "list_colours": [colour for _, colour in scene.cells],
                "list_shapes": [shape for shape, _ in scene.cells],
                "list_codes": [self.codes.get(shape, "") for shape, _ in scene.cells],
            }[kind]
            answer = _by_rows(values, scene.columns)
        else:
            at = chance.randrange(len(scene.cells))
            cell = CELLS.pick(chance, split).format(row=at // scene.columns + 1, column=at % scene.columns + 1)
            text = _AT.pick(chance, split).format(picture=picture, cell=cell, what=kind.removeprefix("no_"))
            shape, colour = scene.cells[at]
            answer = {"colour": colour, "shape": shape, "code": self.codes.get(shape, ""), "no_code": NOT_SHOWN}[kind]
        if kind in ("code", "list_codes"):
            return Question("legend", kind, text, answer, 2, (0, scene.place), (scene.place,))
        return Question("legend", kind, text, answer, 1, (scene.place,), (scene.place,))

    def _ask_legend(self, kind: str, chance: Random, split: Split) -> Question:
        if kind == "list_legend":
            text = _LIST_LEGEND.pick(chance, split)
            return Question("legend", kind, text, ", ".join(f"{s} {c}" for s, c in self.codes.items()), 1, (0,), (0,))
        at = chance.randrange(len(self.codes))
        shape, code = list(self.codes.items())[at]
        if kind == "legend_cell":
            row, column = divmod(at, self._legend_columns)
            cell = CELLS.pick(chance, split).format(row=row + 1, column=column + 1)
            return Question("legend", kind, _LEGEND_CELL.pick(chance, split).format(cell=cell), code, 1, (0,), (0,))
        return Question("legend", kind, _LEGEND.pick(chance, split).format(shape=shape), code, 1, (0,), (0,))

    def _ask_thing(self, kind: str, chance: Random, split: Split) -> Question:
        """A question that finds something by its looks; where nothing is the only one of its kind, one by its place."""
        scene = chance.choice(self.scenes)
        at = chance.randrange(len(scene.cells))
        shape, colour = scene.cells[at]
        cell = {"row": at // scene.columns + 1, "column": at % scene.columns + 1}
        rivals = {
            "tag": sum(self._shows(other, cell, scene.cells[at]) for other in self.scenes),
            "colour_of": sum(other == shape for other, _ in scene.cells),
            "where": scene.cells.count(scene.cells[at]),
        }[kind]
        if rivals > 1:
            return self.ask("colour", chance, split)
        place = CELLS.pick(chance, split).format(**cell)
        picture = PICTURES.pick(chance, split).format(tag=scene.tag)
        phrases = {"tag": _TAG, "colour_of": _COLOUR_OF, "where": _WHERE}[kind]
        words = {"picture": picture, "cell": place, "shape": shape, "thing": f"{colour} {shape}"}
        answer = {"tag": scene.tag, "colour_of": colour, "where": "row {row}, column {column}".format(**cell)}[kind]
        text = phrases.pick(chance, split).format(**words)
        return Question("legend", kind, text, answer, 1, (scene.place,), (scene.place,))

    @staticmethod
    def _shows(scene: Scene, cell: dict[str, int], thing: Cell) -> bool:
        row, column = cell["row"] - 1, cell["column"] - 1
        return row < scene.rows and column < scene.columns and scene.cells[row * scene.columns + column] == thing

    def _ask_change(self, kind: str, chance: Random, split: Split) -> Question:
        single = [change for change in self.changes if len(change[2]) == 1]
        before, after, places = chance.choice(self.changes if kind == "list_changes" else single)
        wording = PICTURES.pick(chance, split)
        names = {"before": wording.format(tag=before.tag), "after": wording.format(tag=after.tag)}
        needs, carriers = (before.place, after.place), (after.place,)
        if kind == "list_changes":
            text = _LIST_CHANGES.pick(chance, split).format(**names)
            marks = ["new" if at in places else "same" for at in range(len(after.cells))]
            return Question("change", kind, text, _by_rows(marks, after.columns), 2, needs, carriers)
        at = places[0]
        if kind == "changed_cell":
            text, answer = (
                _CHANGED.pick(chance, split),
                f"row {at // after.columns + 1}, column {at % after.columns + 1}",
            )
        else:
            text, answer = _CHANGED_TO.pick(chance, split), " ".join(reversed(after.cells[at]))
        return Question("change", kind, text.format(**names), answer, 2, needs, carriers)

    def _add_scene(self, chance: Random, split: Split, shapes: list[str], *, twice: bool) -> None:
        rows, columns = chance.choice(split.grids)
        cells = [(chance.choice(shapes), chance.choice(list(COLOURS))) for _ in range(rows * columns)]
        tag, look = self._tags.pop(), chance.getrandbits(32)
        first = Scene(f"{tag}1" if twice else tag, rows, columns, cells, len(self.pictures))
        self._draw_scene(Random(look), first)
        if not twice:
            return
        several = min(len(cells), chance.randint(2, 3))
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
            sheet.write(str(row + 1), left - 16, top + pitch * row + pitch // 2 - 15, self._font, 0)
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
        self._legend_columns = columns = 2 if width < 190 else 3
        rows = -(-len(self.codes) // columns)
        wide, high = min(68, (width - SIDE_WIDTH) // columns), min(50, (height - TAG_HEIGHT - 2) // rows)
        size = 1 if wide >= 56 and high >= 36 else 0
        reach = (30, 37)[size]
        left, top = SIDE_WIDTH - chance.randrange(6), TAG_HEIGHT
        for column in range(min(columns, len(self.codes))):
            sheet.write(str(column + 1), left + wide * column + reach // 2 - 6, top - 26, self._font, 0)
        for row in range(rows):
            sheet.write(str(row + 1), left - 18, top + high * row + high // 2 - 15, self._font, 0)
        for at, (shape, code) in enumerate(self.codes.items()):
            row, column = divmod(at, columns)
            x, y = left + wide * column, top + high * row + high // 2
            sheet.shape(shape, sheet.ink, x + reach // 2 - 1, y, size)
            sheet.write(code, x + reach - 1, y - 14, self._font, 2)
        self.pictures.append(sheet.finish())


def _by_rows(values: list[str], columns: int) -> str:
    return ", ".join(" ".join(values[at : at + columns]) for at in range(0, len(values), columns))
