"""Random weights that make mistakes visible.

In: a model fresh from its constructor and a seed. Out: the same model with every parameter drawn anew. The
constructors' own weights (standard deviation 0.02) make attention all but uniform at this width, so that a wrong
position or a swapped image would change the logits by less than a tolerance. Each parameter has its own generator,
seeded by its name: bytes depend neither on the order of construction nor on the release of transformers.
What this file does not know: families. It goes by a parameter's name and shape alone.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PROJECTION_GAIN = 1.0
"""Output deviation of a projection for inputs of deviation one."""

QUERY_KEY_GAIN = 1.5
"""The same for queries and keys: attention scores then deviate by about 2, which is clearly not uniform."""

RESIDUAL_GAIN = 3.0
"""The same for what the decoder adds to its residual stream, so that a token's own embedding does not outweigh the
layers: with tied embeddings greedy decoding would repeat one token for ever."""

LOGIT_DEVIATION = 3.0
"""Logits within about ±10: sharp enough to differ, far from overflow."""

VECTOR_DEVIATION = 0.1
"""How far norm weights and biases lie from one and zero: far enough that leaving one out shows."""

EMBEDDING_DEVIATION = 0.5
"""Position embeddings, class tokens, row ends and layer scales of the vision towers."""

SPECIAL_SHRINK = 0.1
"""Rows of special tokens in the output embedding, so that greedy decoding does not stop or emit placeholders."""


@torch.no_grad()
def draw_weights(model: Any, *, seed: int, special_ids: Sequence[int]) -> None:
    """Replace every parameter of `model` (and a router's score bias) by seeded random values."""
    for name, parameter in model.named_parameters():
        parameter.copy_(_draw(name, parameter, seed))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(VECTOR_DEVIATION * normal(name, buffer, seed))
    model.get_output_embeddings().weight[list(special_ids)] *= SPECIAL_SHRINK


def _draw(name: str, parameter: Tensor, seed: int) -> Tensor:
    """A new value for one parameter, of its shape: vectors, embeddings and projections each at their own scale."""
    noise = normal(name, parameter, seed)
    owner, _, leaf = name.rpartition(".")
    if parameter.dim() == 1 and leaf == "weight":
        centre = QUERY_KEY_GAIN if owner.endswith(("q_norm", "k_norm")) else 1.0
        return centre + VECTOR_DEVIATION * noise
    if parameter.dim() == 1:
        return (VECTOR_DEVIATION if leaf == "bias" else EMBEDDING_DEVIATION) * noise
    if owner.endswith(("embed_tokens", "lm_head")):
        # Tied or not, both get the length the logits need: a norm follows the input side and evens it out. Rows of one
        # length, or greedy decoding would favour the longest.
        return torch.nn.functional.normalize(noise, dim=1) * LOGIT_DEVIATION
    if parameter.dim() <= 3 and ("embed" in f"{owner.rpartition('.')[2]}.{leaf}" or leaf.endswith("token")):
        return EMBEDDING_DEVIATION * noise
    fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
    return noise * (_gain(name) / math.sqrt(fan_in))


def _gain(name: str) -> float:
    path = name.removesuffix(".weight")
    if ".layers." in path and path.endswith(("o_proj", "down_proj")):
        return RESIDUAL_GAIN
    # Latent attention is left alone: YaRN's factor in its softmax scale sharpens it already.
    return QUERY_KEY_GAIN if path.endswith(("q_proj", "k_proj", "qkv")) else PROJECTION_GAIN


def normal(name: str, like: Tensor, seed: int) -> Tensor:
    """Normal fp32 noise of `like`'s shape, decided by the name and the seed alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(like.shape, generator=generator, dtype=torch.float32)
