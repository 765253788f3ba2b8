"""Paints the pictures of a whole batch at once, on any device, exactly as `workloads.pictures.draw` does one."""

from __future__ import annotations

import torch
from torch import Tensor

from looseleaf.workloads.masks import SHAPE_BOX, sheets


class Painter:
    """Holds the masks on one device."""

    def __init__(self, device: str | torch.device) -> None:
        self._sheets = [torch.tensor(sheet, device=device).float() / 255 for sheet in sheets()]

    def paint(self, shapes: Tensor, letters: Tensor, grounds: Tensor, height: int, width: int) -> Tensor:
        """Pictures [n, 3, height, width] in 0..1 from marks [mark, 8] by sheet and grounds [n, 3].

        Marks do not overlap, so that adding each mark's share in any order gives the drawing; colours are rounded to
        whole levels as in an image file.
        """
        room = SHAPE_BOX
        tall, wide, count = height + 2 * room, width + 2 * room, len(grounds)
        canvas = grounds.float().repeat_interleave(tall * wide, dim=0)
        for sheet, ours in zip(self._sheets, (shapes.long(), letters.long()), strict=True):
            offsets = torch.arange(sheet.shape[-1], device=ours.device)
            rows = ours[:, 0, None] * tall + ours[:, 4, None] + room + offsets
            places = rows[:, :, None] * wide + (ours[:, 3, None] + room + offsets)[:, None, :]
            colours = ours[:, 5:].float() - grounds[ours[:, 0]].float()
            shares = sheet[ours[:, 2]][..., None] * colours[:, None, None, :]
            canvas.index_add_(0, places.flatten(), shares.flatten(0, 2))
        inside = canvas.view(count, tall, wide, 3)[:, room : room + height, room : room + width]
        return inside.round().clamp(0, 255).div(255).permute(0, 3, 1, 2)
