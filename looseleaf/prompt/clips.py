"""Clips: frames → temporal patches, cut as the Qwen2-VL processors cut them.

transformers' own video processors need torchvision; this one needs the image processor's settings only. Frames are
resized, scaled and normalised by that image processor, one by one, then paired along time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from PIL.Image import Image as PILImage
from torch import Tensor

from looseleaf.errors import PromptError
from looseleaf.model.adapter import Adapter


def clip_inputs(
    adapter: Adapter, frames: Sequence[PILImage], seconds_per_frame: float
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Tokens of a clip with its wrap, and what the vision tower takes. An odd last frame is shown twice."""
    if len({frame.size for frame in frames}) > 1:
        raise PromptError(f"the frames of a Clip have one size, got {sorted({frame.size for frame in frames})}")
    processor = adapter.processor.image_processor
    depth, merge = processor.temporal_patch_size, processor.merge_size
    out = processor(images=list(frames), return_tensors="pt")
    grid = out["image_grid_thw"][0]
    patches = int(grid[1] * grid[2])
    # an image's patch holds `depth` copies of it: [frame, patch, channel, depth, pixels]
    cut = out["pixel_values"].view(len(frames), patches, 3, depth, -1)[:, :, :, 0]
    steps = [min(index, len(frames) - 1) for index in range(-(-len(frames) // depth) * depth)]
    paired = cut[torch.tensor(steps)].view(len(steps) // depth, depth, patches, 3, -1)
    pixels = paired.permute(0, 2, 3, 1, 4).reshape(-1, out["pixel_values"].shape[1])
    count = pixels.shape[0] // merge**2
    before, after = adapter.family.wrap
    text = f"{before}{adapter.processor.video_token * count}{after}"
    ids = tuple(adapter.tokenizer(text, add_special_tokens=False)["input_ids"])
    inputs = {
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[len(steps) // depth, int(grid[1]), int(grid[2])]]),
        "second_per_grid_ts": torch.tensor([seconds_per_frame * depth]),
    }
    return ids, inputs
