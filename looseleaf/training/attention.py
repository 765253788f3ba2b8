"""The two attention functions training registers with transformers: one for images, one for text.

Stock vision towers walk over their images one by one unless their attention is called flash; ours is called so, takes
all patches in one call and treats the images, all of one size, as a batch. Text attention obeys the mask it is given,
whatever it is; on a GPU it skips the blocks in which nothing is seen, which are most: a row holds several prompts. It
also writes down how long queries and keys are, where somebody wants to know. What this file does not know: masks'
meaning, models.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMAGES = "looseleaf_flash_images"
"""transformers takes its path without a loop for names that contain `flash`."""

TEXT = "looseleaf_training"

BLOCK = 128
"""Queries, and keys, that are skipped together."""


def register() -> None:
    """Make both known to transformers; registering twice does no harm."""
    AttentionInterface.register(IMAGES, attend_images)
    AttentionInterface.register(TEXT, attend_text)


def attend_images(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    max_length_q: int,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Every patch sees its own image. query, key, value [1, head, image * patch, dim], `max_length_q` patches an image.

    Returns [1, image * patch, head, dim].
    """
    assert attention_mask is None, "images are told apart by their length alone"
    heads, _, dim = query[0].shape
    query, key, value = (one[0].view(heads, -1, max_length_q, dim).transpose(0, 1) for one in (query, key, value))
    seen = scaled_dot_product_attention(query, key, value, scale=scaling)
    return seen.transpose(1, 2).flatten(0, 1)[None], None


def attend_text(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    *,
    scaling: float,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention under a mask [batch, 1, query, key], true where seen, or the blocks of one.

    query [batch, head, token, dim]; key and value [batch, key head, token, dim]; returns [batch, token, head, dim].
    """
    assert attention_mask is not None, "training always says what may be seen"
    lengths = module._buffers.get("lengths")
    if lengths is not None:
        with torch.no_grad():
            lengths.copy_(torch.cat([_length(query), _length(key)]))
    # Rotation lifts queries and keys to fp32 under autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    groups = query.shape[1] // key.shape[1]
    if isinstance(attention_mask, BlockMask):
        seen: Any = flex_attention(
            query, key, value, block_mask=attention_mask, scale=scaling, enable_gqa=groups > 1
        )  # fmt: skip
        return seen.transpose(1, 2).contiguous(), None
    # Kernels that take a mask do not take groups.
    key, value = (one.repeat_interleave(groups, dim=1) if groups > 1 else one for one in (key, value))
    seen = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return seen.transpose(1, 2).contiguous(), None


def in_blocks(mask: Tensor) -> BlockMask:
    """A mask [batch, 1, token, token], and which of its blocks have something to see, or everything."""
    batch, _, tokens, _ = mask.shape
    count = tokens // BLOCK
    cut = mask.view(batch, count, BLOCK, count, BLOCK)
    some, whole = cut.any(4).any(2), cut.all(4).all(2)
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda row, _, query, key: mask[row, 0, query, key],
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each line [batch, line, block] are true, and their numbers, those first."""
    numbers = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], numbers.int()[:, None]


def _length(vectors: Tensor) -> Tensor:
    """Root of the mean square length by head. vectors [batch, head, token, dim]"""
    return vectors.float().square().sum(-1).mean((0, 2)).sqrt()
