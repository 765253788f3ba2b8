"""The four small VLMs we train: real transformers classes, at a size that learns and still fits in a package.

In: a recipe's name, a folder, a corpus, a seed. Out: a folder that plain `from_pretrained` loads, with fp32 weights
ready for training, byte for byte the same for the same corpus and seed. A recipe is a tiny family (`model/tiny`) with
other sizes and a chat template that takes tools. What this file does not know: how images become rows (vision.py),
and how any of it is trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from looseleaf.errors import ConfigError
from looseleaf.model.tiny import templates
from looseleaf.model.tiny.build import write_folder
from looseleaf.model.tiny.families import FAMILY, QWEN_VISUALS, Family
from looseleaf.model.tiny.vocabulary import build_tokenizer
from looseleaf.model.tiny.weights import normal

VOCABULARY_SIZE = 1_500
"""Ordinary tokens, bytes included."""

VOCABULARY_MULTIPLE = 64
"""Rows of the embedding are rounded up to this many: matrix units want aligned widths."""

MAX_POSITION = 32_768

DEVIATION = 0.02
"""Of every fresh projection and embedding."""

PLACES = 0.4
"""Height of the waves a vision tower without rotary starts its places with: about as much as a patch brings. From small
noise its first layers still looked everywhere at once when training ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One small VLM: a family's classes, tokenizer style, processor and template, and config values by dotted key."""

    family: Family
    sizes: Mapping[str, Any]


def _rope(theta: float, **more: Any) -> Mapping[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


def _text(rope: Mapping[str, Any], **changes: Any) -> Mapping[str, Any]:
    """Eight layers of width 384 with 6 query heads and 3 key heads of 64."""
    common = {
        "num_hidden_layers": 8,
        "hidden_size": 384,
        "intermediate_size": 768,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": rope,
        "tie_word_embeddings": True,
    }
    return common | changes


def _qwen2_5_vl() -> Recipe:
    vision: dict[str, Any] = {"depth": 4, "hidden_size": 256, "intermediate_size": 512, "num_heads": 4}
    vision |= {"out_hidden_size": 384, "window_size": 112, "fullatt_block_indexes": [0, 1, 2, 3]}
    text = _text(_rope(10_000.0, mrope_section=[8, 12, 12]), intermediate_size=704)
    template = templates.chatml_with_tools(**QWEN_VISUALS)
    return Recipe(
        family=replace(FAMILY["qwen2_5_vl"], template=template),
        sizes={"text_config": text, "vision_config": vision, "tie_word_embeddings": True},
    )


def _qwen3_vl() -> Recipe:
    # Every patch is a token: 224 pixels are 256 tokens, and the vision tower stays as cheap as the others'.
    cuts = {"patch_size": 14, "merge_size": 1}
    vision: dict[str, Any] = {"depth": 4, "hidden_size": 256, "intermediate_size": 640, "num_heads": 4}
    vision |= {"patch_size": 14, "spatial_merge_size": 1, "out_hidden_size": 384}
    vision |= {"num_position_embeddings": 256, "deepstack_visual_indexes": [1, 2]}
    rope = _rope(10_000.0, mrope_section=[12, 10, 10], mrope_interleaved=True)
    family = FAMILY["qwen3_vl"]
    return Recipe(
        family=replace(
            family,
            template=templates.chatml_with_tools(**QWEN_VISUALS),
            image_processor={**family.image_processor, **cuts},
            video_processor={**family.video_processor, **cuts},
        ),
        sizes={"text_config": _text(rope, head_dim=64), "vision_config": vision, "tie_word_embeddings": True},
    )


def _kimi_k25() -> Recipe:
    # Without a query rank transformers saves the text's q_proj under the vision tower's name and cannot load it again.
    latent = {"q_lora_rank": 192, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    latent |= {"v_head_dim": 64, "num_key_value_heads": 6}
    # Every layer is dense; the experts' settings stay legal and unused.
    experts = {"first_k_dense_replace": 8, "n_routed_experts": 2, "num_experts_per_tok": 1}
    vision = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    family = FAMILY["kimi_k25"]
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n"
    template = templates.kimi(image=image, video="<|kimi_k25_video_placeholder|>\\n", system="", tools=True)
    return Recipe(
        family=replace(family, template=template),
        sizes={
            "text_config": _text(_rope(10_000.0), **latent, **experts),
            "vision_config": vision,
            "projection_hidden_size": 256,
            "tie_word_embeddings": True,
        },
    )


def _deepseek_vl() -> Recipe:
    vision = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    vision |= {"patch_size": 14, "image_size": 224}
    family = FAMILY["deepseek_vl"]
    template = templates.deepseek(image="<image_placeholder>", end="<｜end▁of▁sentence｜>", tools=True)
    return Recipe(
        family=replace(
            family,
            template=template,
            processor={**family.processor, "num_image_tokens": 256},
            image_processor={**family.image_processor, "size": {"height": 224, "width": 224}},
        ),
        sizes={
            "text_config": _text(_rope(10_000.0), num_key_value_heads=6, head_dim=64),
            "vision_config": vision,
            "tie_word_embeddings": True,
        },
    )


RECIPES: Mapping[str, Recipe] = {
    "qwen2_5_vl": _qwen2_5_vl(),
    "qwen3_vl": _qwen3_vl(),
    "kimi_k25": _kimi_k25(),
    "deepseek_vl": _deepseek_vl(),
}
"""GQA (the default), deepstack, MLA and MHA."""


def build_folder(name: str, folder: Path, *, corpus: Sequence[str], seed: int) -> Path:
    """Write the untrained model `name` into `folder`, made if missing, with a tokenizer learned from `corpus`."""
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}: expected one of {', '.join(RECIPES)}")
    recipe = RECIPES[name]
    tokenizer = build_tokenizer(recipe.family.vocabulary, corpus=corpus, size=VOCABULARY_SIZE)
    rows = -(-len(tokenizer) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return write_folder(
        recipe.family,
        folder,
        tokenizer=tokenizer,
        draw=partial(initialise, seed=seed),
        overrides={**recipe.sizes, "text_config.vocab_size": rows},
    )


@torch.no_grad()
def initialise(model: Any, *, seed: int) -> None:
    """Fresh weights for training: norms one, biases zero, the rest normal.

    What a block adds to its residual stream is drawn smaller, by the square root of how many times its tower adds, so
    that the stream starts out as long as in a tower of one block (GPT-2, section 2.3).
    """
    depths = {"text": model.config.get_text_config().num_hidden_layers, "vision": _vision_depth(model.config)}
    for name, parameter in model.named_parameters():
        parameter.copy_(_fresh(name, parameter, depths, seed))


def _vision_depth(config: Any) -> int:
    vision = config.vision_config
    return int(vision.depth if hasattr(vision, "depth") else vision.num_hidden_layers)


def _places(table: Tensor) -> Tensor:
    """Sines and cosines of a square grid's rows and columns [place, width]: near places are alike from the start."""
    places, width = table.shape
    side = math.isqrt(places)
    speed = side ** (-torch.arange(width // 4) / (width // 4))
    angles = math.pi / 2 * torch.arange(side)[:, None] * speed
    waves = torch.cat((angles.sin(), angles.cos()), dim=1)
    rows, columns = waves[:, None].expand(-1, side, -1), waves[None].expand(side, -1, -1)
    return torch.cat((rows, columns), dim=2).reshape(places, width).to(table)


_ADDS_TO_RESIDUAL = ("o_proj", "down_proj", "attn.proj", "out_proj", "fc2")
"""Last projections of attention and MLP by name, wherever they stand inside a numbered block."""


def _fresh(name: str, parameter: Tensor, depths: Mapping[str, int], seed: int) -> Tensor:
    owner, _, leaf = name.rpartition(".")
    if parameter.dim() == 1:
        return torch.ones_like(parameter) if leaf == "weight" else torch.zeros_like(parameter)
    if owner.endswith("position_embedding"):
        return PLACES * _places(parameter)
    noise = DEVIATION * normal(name, parameter, seed)
    in_block = ".layers." in owner or ".blocks." in owner
    if in_block and owner.endswith(_ADDS_TO_RESIDUAL):
        return noise / math.sqrt(2 * depths["text" if ".language_model." in owner else "vision"])
    return noise
