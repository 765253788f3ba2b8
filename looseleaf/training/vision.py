"""Many images of one size through a vision tower at once.

In: images [image, 3, height, width] in 0..1. Out: their visual rows, equal to what the model computes from its own
processor's pixels. Stock towers pack images of any size into one run of patches and find out on the host where each
ends; here all are of one size, so positions are worked out once for one image, by the stock code, and repeated. The
modules are the tower's own. What this file does not know: tokens, text, and how the tower is trained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from looseleaf.errors import ConfigError
from looseleaf.training import attention


@dataclass(frozen=True, kw_only=True)
class Features:
    """Visual rows [image, token, width], and those deepstack adds behind the first decoder layers, if any."""

    rows: Tensor
    deep: tuple[Tensor, ...] = ()


class Tower(Protocol):
    """Turns images into visual rows."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, in order, each of which may be compiled in place."""

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of visual tokens an image of this many pixels has."""

    def __call__(self, images: Tensor) -> Features:
        """Images [image, 3, height, width] in 0..1 to their features."""


def tower_of(model: Any, processor: Any) -> Tower:
    """The tower of a loaded model; its attention is switched to ours."""
    kind = model.config.model_type
    makers: Mapping[str, Callable[[Any, Any], Tower]] = {
        "qwen2_5_vl": _qwen_tower,
        "qwen3_vl": _qwen_tower,
        "kimi_k25": _kimi_tower,
        "deepseek_vl": SquareTower,
    }
    if kind not in makers:
        raise ConfigError(f"a model of type {kind!r} cannot be trained here: expected one of {', '.join(makers)}")
    return makers[kind](model.base_model, processor.image_processor)


def cut_patches(images: Tensor, *, patch: int, merge: int) -> Tensor:
    """[image, channel, height, width] to [image, patch, channel * patch * patch].

    Patches of one cell of `merge` × `merge` stand together, cells row by row: the order Qwen's processor writes.
    """
    count, channels, height, width = images.shape
    rows, columns = height // (patch * merge), width // (patch * merge)
    cut = images.reshape(count, channels, rows, merge, patch, columns, merge, patch)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(count, rows * columns * merge**2, channels * patch**2)


class Normalise:
    """What an image processor does to colours in 0..1."""

    def __init__(self, image_processor: Any, device: torch.device):
        self._mean, self._deviation = (
            torch.tensor(list(values), device=device).view(3, 1, 1)
            for values in (image_processor.image_mean, image_processor.image_std)
        )

    def __call__(self, images: Tensor) -> Tensor:
        return (images - self._mean) / self._deviation


@dataclass(frozen=True, kw_only=True)
class Places:
    """Where one image's patches stand: rotation [patch, dim], and taps [patch, tap] into a table of learned places."""

    cos: Tensor
    sin: Tensor
    taps: Tensor | None = None
    weights: Tensor | None = None


class PatchTower:
    """Qwen's and Kimi's towers: patches, rotary positions, blocks that take one run of all patches, cells merged.

    Patches are kept cell by cell. Where stock code keeps them row by row and gathers cells later (Kimi), or sorts them
    by windows (Qwen2.5-VL), that changes nothing: every patch of an image sees every other and carries its own place.
    """

    def __init__(
        self,
        image_processor: Any,
        *,
        embed: Any,
        rotary: nn.Module,
        blocks: Sequence[nn.Module],
        merge: Callable[[Tensor], Tensor],
        table: Any = None,
        resampler: Any = None,
        deep: Mapping[int, nn.Module] | None = None,
    ):
        """`embed` is the patch convolution, `table` [..., width] the learned places and `resampler` says how to stretch
        them; `merge` turns hidden patches [patch, width] into rows, `deep` does so behind some blocks.
        """
        self.blocks = blocks
        self._images = image_processor
        self._embed = embed
        self._rotary = rotary
        self._merge = merge
        self._table = table
        self._resampler = resampler
        self._deep = deep or {}
        self._normalise = Normalise(image_processor, embed.weight.device)
        self._places: dict[tuple[int, int], Places] = {}

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of visual tokens; refuses sizes the processor would change."""
        patch, merge = self._images.patch_size, self._images.merge_size
        cell = patch * merge
        patches = (height // patch) * (width // patch)
        if height % cell or width % cell or self._images.get_number_of_image_patches(height, width, {}) != patches:
            raise ConfigError(
                f"an image of {height} x {width} pixels would be resized: sides must be multiples of {cell} and the "
                f"size within {dict(self._images.size)}"
            )
        return height // cell, width // cell

    def __call__(self, images: Tensor) -> Features:
        count, _, height, width = images.shape
        places = self._place(height, width)
        hidden = self._embedded(images)
        if places.taps is not None and places.weights is not None:
            learned = self._table.flatten(0, -2)[places.taps] * places.weights[..., None]
            hidden = hidden + learned.sum(1).to(hidden.dtype)
        patches = hidden.shape[1]
        hidden = hidden.flatten(0, 1)
        turn = (places.cos.repeat(count, 1), places.sin.repeat(count, 1))
        deep = []
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, cu_seqlens=None, max_seqlen=patches, position_embeddings=turn)
            if number in self._deep:
                deep.append(_by_image(self._deep[number](hidden), count))
        return Features(rows=_by_image(self._merge(hidden), count), deep=tuple(deep))

    def _embedded(self, images: Tensor) -> Tensor:
        """Patch embeddings [image, patch, width], in the weights' dtype also under autocast, as a residual stream is.

        The convolution's kernel is one patch, so a matrix product does it; where the kernel spans two frames (Qwen) an
        image is its frame twice, and the kernel's two halves add up.
        """
        weight = self._embed.weight
        patches = cut_patches(self._normalise(images), patch=self._images.patch_size, merge=self._images.merge_size)
        kernel = weight.sum(2) if weight.dim() == 5 else weight
        return linear(patches.to(weight.dtype), kernel.flatten(1), self._embed.bias).to(weight.dtype)

    def _place(self, height: int, width: int) -> Places:
        if (height, width) not in self._places:
            self.grid(height, width)
            # Kept for later calls: must not be bound to the mode of this one.
            with torch.inference_mode(False), torch.no_grad():
                self._places[height, width] = self._make_places(height, width)
        return self._places[height, width]

    def _make_places(self, height: int, width: int) -> Places:
        patch, merge = self._images.patch_size, self._images.merge_size
        device = self._embed.weight.device
        grid = torch.tensor([[1, height // patch, width // patch]], device=device)
        cos, sin = self._rotary(torch.empty(0, device=device), get_vision_position_ids(grid, merge))
        if self._table is None:
            return Places(cos=cos, sin=sin)
        taps, weights = get_vision_interpolation_indices_and_weights(
            grid,
            self._resampler.num_grid_per_side,
            mode=self._resampler.interpolation_mode,
            align_corners=self._resampler.interpolation_align_corners,
            spatial_merge_size=merge,
        )
        return Places(cos=cos, sin=sin, taps=taps, weights=weights)


def _by_image(rows: Tensor, count: int) -> Tensor:
    return rows.view(count, -1, rows.shape[-1])


def _attend_together(tower: Any) -> None:
    # Not by `set_attn_implementation`: it would look for an installed flash-attention package of our name.
    tower.config._attn_implementation = attention.IMAGES


def _qwen_tower(model: Any, image_processor: Any) -> Tower:
    visual = model.visual
    _attend_together(visual)
    indexes = getattr(visual, "deepstack_visual_indexes", ())
    deep = dict(zip(indexes, visual.deepstack_merger_list, strict=True)) if indexes else {}
    learned = {"table": visual.pos_embed.weight, "resampler": visual} if hasattr(visual, "pos_embed") else {}
    return PatchTower(
        image_processor,
        embed=visual.patch_embed.proj,
        rotary=visual.rotary_pos_emb,
        blocks=visual.blocks,
        merge=visual.merger,
        deep=deep,
        **learned,
    )


def _kimi_tower(model: Any, image_processor: Any) -> Tower:
    tower, project = model.vision_tower, model.mm_projector
    _attend_together(tower)
    cell = tower.merge_kernel_size[0] * tower.merge_kernel_size[1]

    def merge(hidden: Tensor) -> Tensor:
        return project(tower.final_layernorm(hidden).view(-1, cell, hidden.shape[-1])).squeeze(1)

    return PatchTower(
        image_processor,
        embed=tower.patch_embed.proj,
        rotary=tower.rotary_emb,
        blocks=tower.layers,
        merge=merge,
        table=tower.patch_embed.pos_emb.position_embeddings,
        resampler=tower.patch_embed.pos_emb,
    )


class SquareTower:
    """DeepSeek-VL's tower: images of one size, which the stock code takes as a batch already.

    Its processor makes every image a square of that size. Training also shows smaller ones, as the upper left part of
    such a square: a quarter of the tokens shows as much of a first step, so a batch holds several times as many.
    """

    def __init__(self, model: Any, image_processor: Any):
        self._model = model
        self._normalise = Normalise(image_processor, model.device)
        vision = model.config.vision_config
        self._side, self._patch = vision.image_size, vision.patch_size

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The encoder's layers."""
        return self._model.vision_model.encoder.layers

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of visual tokens; refuses half patches, and more than the processor's size."""
        if height % self._patch or width % self._patch or max(height, width) > self._side:
            raise ConfigError(
                f"an image of {height} x {width} pixels cannot be taken: sides must be multiples of {self._patch}, "
                f"{self._side} at most"
            )
        return height // self._patch, width // self._patch

    def __call__(self, images: Tensor) -> Features:
        rows, columns = self.grid(*images.shape[-2:])
        pixels = self._normalise(images).to(self._model.dtype)
        across = self._side // self._patch
        places = torch.arange(across**2, device=images.device).view(across, across)[:rows, :columns].reshape(1, -1)
        self._model.vision_model.embeddings.position_ids = places  # by which the stock code looks its places up
        return Features(rows=self._model.get_image_features(pixels, return_dict=True).pooler_output)
