"""Pictures as data, and drawing them: a ground and marks, each a mask at a place in a colour.

A Picture is small and quick to make; `draw` turns it into a PIL image and `training/painter.py` turns thousands into a
tensor on a GPU. Marks hardly ever touch, and a pixel is ground + coverage x (colour - ground) in any order of drawing.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image as PILImages
from PIL.Image import Image as PILImage

from looseleaf.workloads.masks import SHAPE_BOX, SHEETS, advances, letter_mask, shape_mask, sheets

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (214, 48, 49),
    "green": (38, 152, 72),
    "blue": (52, 92, 226),
    "yellow": (226, 182, 24),
    "purple": (136, 58, 178),
    "orange": (240, 122, 30),
    "cyan": (30, 178, 200),
    "pink": (240, 110, 178),
}
"""Told apart on white."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What one image shows."""

    width: int
    height: int
    ground: Colour
    marks: NDArray[np.int16]
    """[mark, 7]: sheet, mask, left, top, red, green, blue."""


class Sheet:
    """Collects the marks of one picture."""

    def __init__(self, width: int, height: int, ground: Colour, ink: Colour) -> None:
        self.width, self.height, self.ground, self.ink = width, height, ground, ink
        self._marks: list[tuple[int, int, int, int, int, int, int]] = []

    def shape(self, name: str, colour: Colour, middle_x: int, middle_y: int, size: int) -> None:
        """A shape around a point; `size` counts SHAPE_SIZES."""
        left, top = middle_x - SHAPE_BOX // 2, middle_y - SHAPE_BOX // 2
        self._marks.append((0, shape_mask(name, size), left, top, *colour))

    def write(self, words: str, left: int, top: int, font: int, size: int, ink: Colour | None = None) -> int:
        """Letters from left to right; returns where the next would stand. `size` counts LETTER_SIZES."""
        steps, ink = advances()[font][size], ink or self.ink
        for character in words:
            if character != " ":
                self._marks.append((1, letter_mask(font, size, character), left, top, *ink))
            left += steps[character]
        return left

    def finish(self) -> Picture:
        marks = np.array(self._marks, dtype=np.int16).reshape(-1, 7)
        return Picture(self.width, self.height, self.ground, marks)


def blank(chance: Random, width: int, height: int) -> Sheet:
    """A light sheet of slightly random tone."""
    ground = (232 + chance.randrange(18), 232 + chance.randrange(18), 232 + chance.randrange(18))
    shade = 16 + chance.randrange(14)
    return Sheet(width, height, ground, (shade, shade, shade))


def draw(picture: Picture) -> PILImage:
    """The image a picture describes."""
    room = SHAPE_BOX
    canvas = np.empty((picture.height + 2 * room, picture.width + 2 * room, 3), dtype=np.float32)
    canvas[:] = picture.ground
    ground = np.array(picture.ground, dtype=np.float32)
    masks = sheets()
    for sheet, mask, left, top, *colour in picture.marks.tolist():
        side = SHEETS[sheet]
        cover = masks[sheet][mask].astype(np.float32)[:, :, None] / np.float32(255)
        area = canvas[top + room : top + room + side, left + room : left + room + side]
        area += cover * (np.array(colour, dtype=np.float32) - ground)
    inside = canvas[room : room + picture.height, room : room + picture.width]
    return PILImages.fromarray(np.clip(np.rint(inside), 0, 255).astype(np.uint8))
