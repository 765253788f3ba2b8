"""What differs between model families, and nothing else.

Everything a family shares with others is found by asking the model (parts, layout, rotary form, vision call, position
rule). Left over are a few facts of its chat format, listed here; `docs/add-a-model.md` walks through adding one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Facts of a family's chat format that no attribute of the model tells."""

    wrap: tuple[str, str] = ("", "")
    """What the chat template writes around an image's placeholder; belongs to the image's chunk."""
    fewer_among_others: bool = False
    """Whether an image is given fewer tokens in a prompt with several (LLaVA-OneVision then leaves its tiles out)."""
    clips: bool = False
    """Whether a clip is one run of visual tokens (families that write timestamps take frames as images)."""
    known: bool = True
    """Whether the conformance matrix covers this family; others are checked on an image when they are opened."""


_VISION = ("<|vision_start|>", "<|vision_end|>")

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(wrap=_VISION, clips=True),
    "qwen2_5_vl": Family(wrap=_VISION, clips=True),
    "qwen3_vl": Family(wrap=_VISION),
    "qwen3_vl_moe": Family(wrap=_VISION),
    "llava_next": Family(),
    "llava_onevision": Family(fewer_among_others=True),
    "deepseek_vl": Family(),
    "kimi_k25": Family(wrap=("<|media_begin|>image<|media_content|>", "<|media_end|>")),
    "internvl": Family(),
    "smolvlm": Family(),
}


def family_of(model_type: str) -> Family:
    """The family's facts; an unlisted one gets the plain defaults and is checked before it is served."""
    return FAMILIES.get(model_type, Family(known=False))
