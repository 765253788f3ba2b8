"""Kimi-K2.5's image processor on PIL and numpy, for machines without torchvision.

transformers ships this family's image processor for torchvision only. In: images and the checkpoint's own
preprocessor_config.json. Out: what that processor returns, `pixel_values` [patch, channel, patch_size, patch_size] in
row order over all images and `image_grid_thw` [image, 3]; grids are equal, pixels differ by resampling alone. What
this file does not know: tokens, prompts, video.
"""

import math
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers.image_processing_backends import PilBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import (
    IMAGENET_STANDARD_MEAN,
    IMAGENET_STANDARD_STD,
    PILImageResampling,
    SizeDict,
)
from transformers.processing_utils import ImagesKwargs

Pixels = NDArray[Any]


class KimiImagesKwargs(ImagesKwargs, total=False):  # type: ignore[call-arg]
    """The settings this family adds to the common ones; transformers checks and fills them by this class."""

    max_patches: int
    patch_size: int
    merge_size: int


class Fit(NamedTuple):
    """Where an image lands: scaled down to `height` × `width`, then padded at the bottom and right."""

    height: int
    width: int
    padded_height: int
    padded_width: int


def fit(height: int, width: int, *, patch_size: int, merge_size: int, max_patches: int, max_side: int) -> Fit:
    """Scale to at most `max_patches` patches in all and `max_side` on a side, never up, and pad to whole cells.

    A cell is `merge_size` × `merge_size` patches. The patch count is of whole patches only, as the model was trained.
    """
    patches = max(1, height // patch_size) * max(1, width // patch_size)
    longest = max_side * patch_size
    scale = min(1.0, math.sqrt(max_patches / patches), longest / height, longest / width)
    scaled_height = min(max(1, int(height * scale)), longest)
    scaled_width = min(max(1, int(width * scale)), longest)
    cell = patch_size * merge_size
    return Fit(scaled_height, scaled_width, -(-scaled_height // cell) * cell, -(-scaled_width // cell) * cell)


def cut_patches(image: Pixels, patch_size: int) -> Pixels:
    """[channel, height, width] to [row * column, channel, patch_size, patch_size], row by row."""
    channels, height, width = image.shape
    rows, columns = height // patch_size, width // patch_size
    cut = image.reshape(channels, rows, patch_size, columns, patch_size).transpose(1, 3, 0, 2, 4)
    return cut.reshape(rows * columns, channels, patch_size, patch_size)


class KimiPilImageProcessor(PilBackend):
    """`Kimi_K25ImageProcessor` without torchvision; the attributes below are that class's defaults."""

    do_resize = True
    resample = PILImageResampling.BICUBIC
    size: ClassVar[Any] = {"max_height": 512, "max_width": 512}  # patches a side, not pixels
    max_patches = 16384
    do_rescale = True
    do_normalize = True
    image_mean = IMAGENET_STANDARD_MEAN
    image_std = IMAGENET_STANDARD_STD
    do_convert_rgb = True
    patch_size = 14
    merge_size = 2
    valid_kwargs = KimiImagesKwargs
    model_input_names: ClassVar[Any] = ["pixel_values", "image_grid_thw"]

    def _validate_preprocess_kwargs(self, size: SizeDict | None = None, **kwargs: Any) -> None:
        if size is not None and (size.max_height is None or size.max_height != size.max_width):
            raise ValueError(f"size must hold equal 'max_height' and 'max_width', got {size}")
        super()._validate_preprocess_kwargs(size=size, **kwargs)

    def _preprocess(
        self,
        images: list[Pixels],
        *,
        do_resize: bool,
        size: SizeDict,
        resample: Any,
        do_rescale: bool,
        rescale_factor: float,
        do_normalize: bool,
        image_mean: Any,
        image_std: Any,
        patch_size: int,
        merge_size: int,
        max_patches: int,
        return_tensors: Any = None,
        **_unused: Any,
    ) -> BatchFeature:
        patches, grids = [], []
        limits = {"patch_size": patch_size, "merge_size": merge_size, "max_patches": max_patches}
        for image in images:
            if do_resize:
                place = fit(*image.shape[-2:], **limits, max_side=size.max_height)
                image = self.resize(image, SizeDict(height=place.height, width=place.width), resample=resample)
                # Padding comes before normalising: the border is black, not mean grey.
                [image] = self.pad([image], SizeDict(height=place.padded_height, width=place.padded_width))
            if do_rescale:
                image = self.rescale(image, rescale_factor)
            if do_normalize:
                image = self.normalize(image, image_mean, image_std)
            patches.append(cut_patches(np.asarray(image, dtype=np.float32), patch_size))
            grids.append([1, image.shape[-2] // patch_size, image.shape[-1] // patch_size])
        data = {"pixel_values": np.concatenate(patches), "image_grid_thw": np.array(grids, dtype=np.int64)}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: dict[str, Any] | None = None) -> int:
        """How many patches an image of this size becomes; transformers' processor asks by this name."""
        given = images_kwargs or {}
        limits = {name: given.get(name, getattr(self, name)) for name in ("patch_size", "merge_size", "max_patches")}
        place = fit(height, width, **limits, max_side=given.get("size", self.size)["max_height"])
        patch_size = int(limits["patch_size"])
        return (place.padded_height // patch_size) * (place.padded_width // patch_size)

    def to_dict(self) -> dict[str, Any]:
        """Saved under the name transformers knows, so that a saved folder loads on either kind of machine."""
        values: dict[str, Any] = super().to_dict()
        return values | {"image_processor_type": "Kimi_K25ImageProcessor"}
