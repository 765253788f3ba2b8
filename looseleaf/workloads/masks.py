"""What pictures are made of: coverage masks of twelve shapes and of letters in the fonts that come with the package.

A mask is a small square of coverage, 0 to 255, that is laid onto a picture in a colour. The product draws with them
(pictures.py) and so does training, on a GPU, from the same table: both draw the same images. Two sheets, because a
letter needs less room than a shape. What this file does not know: colours, places, questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PILImages
from PIL import ImageDraw, ImageFont

SHAPES = (
    "circle", "ring", "square", "frame", "cross", "bar", "triangle", "wedge", "diamond", "hexagon", "star", "spark",
)  # fmt: skip
SHAPE_SIZES = (26, 34, 44)
SHAPE_BOX = 44
CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
LETTER_SIZES = (17, 20, 23)
LETTER_BOX = 28
BASELINE = 21
"""Where letters stand in their box."""

SHEETS = (SHAPE_BOX, LETTER_BOX)
"""Sheet 0 holds shapes, sheet 1 letters; the side of a mask on each."""

Masks = NDArray[np.uint8]


@cache
def fonts() -> tuple[tuple[int, ...], tuple[int, ...], tuple[Path, ...]]:
    """The numbers of the fonts training uses, of those it never sees, and the files of all."""
    folder = Path(str(files("looseleaf.workloads"))) / "fonts"
    paths = tuple(sorted(path for path in folder.iterdir() if path.suffix in (".ttf", ".otf")))
    held = tuple(number for number, path in enumerate(paths) if path.name.startswith("held-out"))
    trained = tuple(number for number, path in enumerate(paths) if path.name.startswith("trained"))
    return trained, held, paths


@cache
def sheets() -> tuple[Masks, Masks]:
    """Every mask: shapes [size x shape, 44, 44] and letters [font x size x character, 28, 28]."""
    shapes = [_shape(pen, side) for side in SHAPE_SIZES for pen in _PENS.values()]
    letters = [
        _letter(path, size, character)
        for path in fonts()[2]
        for size in LETTER_SIZES
        for character in CHARACTERS
    ]  # fmt: skip
    return np.stack(shapes), np.stack(letters)


@cache
def advances() -> list[list[dict[str, int]]]:
    """How far each letter moves the pen, in whole pixels: by font, size and character."""
    table = []
    for path in fonts()[2]:
        sizes = [ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC) for size in LETTER_SIZES]
        table.append([{c: math.ceil(font.getlength(c)) for c in CHARACTERS + " "} for font in sizes])
    return table


def shape_mask(shape: str, size: int) -> int:
    """The place of a shape on its sheet; `size` counts SHAPE_SIZES."""
    return size * len(SHAPES) + SHAPES.index(shape)


def letter_mask(font: int, size: int, character: str) -> int:
    """The place of a letter on its sheet; `size` counts LETTER_SIZES."""
    return (font * len(LETTER_SIZES) + size) * len(CHARACTERS) + _CHARACTER[character]


_CHARACTER = {character: number for number, character in enumerate(CHARACTERS)}

_Pen = Callable[[ImageDraw.ImageDraw, float], None]


def _shape(pen: _Pen, side: int) -> Masks:
    """Drawn four times as large in the middle of the box, then averaged down."""
    large = PILImages.new("L", (SHAPE_BOX * 4, SHAPE_BOX * 4), 0)
    inner = PILImages.new("L", (side * 4, side * 4), 0)
    pen(ImageDraw.Draw(inner), side * 4)
    corner = (SHAPE_BOX - side) * 2
    large.paste(inner, (corner, corner))
    return np.asarray(large.resize((SHAPE_BOX, SHAPE_BOX), PILImages.Resampling.BOX))


def _letter(path: Path, size: int, character: str) -> Masks:
    font = ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    box = PILImages.new("L", (LETTER_BOX, LETTER_BOX), 0)
    ImageDraw.Draw(box).text((2, BASELINE), character, fill=255, font=font, anchor="ls")
    return np.asarray(box)


def _corners(count: int, *, turn: float = 0.0, inner: float | None = None) -> _Pen:
    def draw(pen: ImageDraw.ImageDraw, side: float) -> None:
        points = []
        total = count if inner is None else 2 * count
        for number in range(total):
            radius = side * (0.5 if inner is None or number % 2 == 0 else 0.5 * inner)
            angle = turn + 2 * math.pi * number / total - math.pi / 2
            points.append((side / 2 + radius * math.cos(angle), side / 2 + radius * math.sin(angle)))
        pen.polygon(points, fill=255)

    return draw


def _box(left: float, top: float, *, hollow: bool = False) -> _Pen:
    def draw(pen: ImageDraw.ImageDraw, side: float) -> None:
        area = (side * left, side * top, side * (1 - left), side * (1 - top))
        if hollow:
            pen.rectangle(area, outline=255, width=int(side * 0.16))
        else:
            pen.rectangle(area, fill=255)

    return draw


def _disc(*, hollow: bool) -> _Pen:
    def draw(pen: ImageDraw.ImageDraw, side: float) -> None:
        if hollow:
            pen.ellipse((0, 0, side - 1, side - 1), outline=255, width=int(side * 0.17))
        else:
            pen.ellipse((0, 0, side - 1, side - 1), fill=255)

    return draw


def _cross(pen: ImageDraw.ImageDraw, side: float) -> None:
    _box(0.36, 0.0)(pen, side)
    _box(0.0, 0.36)(pen, side)


_PENS: dict[str, _Pen] = {
    "circle": _disc(hollow=False),
    "ring": _disc(hollow=True),
    "square": _box(0.06, 0.06),
    "frame": _box(0.06, 0.06, hollow=True),
    "cross": _cross,
    "bar": _box(0.0, 0.32),
    "triangle": _corners(3),
    "wedge": _corners(3, turn=math.pi),
    "diamond": _corners(4),
    "hexagon": _corners(6),
    "star": _corners(5, inner=0.42),
    "spark": _corners(4, inner=0.34),
}
