"""The two attention functions training registers with transformers: one for images, one for text.

Stock vision towers walk over their images one by one unless their attention is called flash; ours is called so, takes
all patches in one call and treats the images, all of one size, as a batch. Text attention obeys the mask it is given,
whatever it is. What this file does not know: masks' meaning, models.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMAGES = "looseleaf_flash_images"
"""transformers takes its path without a loop for names that contain `flash`."""

TEXT = "looseleaf_training"


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
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_unused: Any,
) -> tuple[Tensor, None]:
    """Attention under a mask [batch, 1, query, key], true where seen.

    query [batch, head, token, dim]; key and value [batch, key head, token, dim]; returns [batch, token, head, dim].
    """
    assert attention_mask is not None, "training always says what may be seen"
    # Rotation lifts queries and keys to fp32 under autocast.
    query, key = query.to(value.dtype), key.to(value.dtype)
    # Kernels that take a mask do not take groups.
    groups = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(groups, dim=1) if groups > 1 else one for one in (key, value))
    seen = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return seen.transpose(1, 2).contiguous(), None
