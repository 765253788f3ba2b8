"""A request and its answer, as callers see them. Data only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from looseleaf.checks import check_number, check_truth, check_whole
from looseleaf.errors import ConfigError
from looseleaf.link.held import Held
from looseleaf.link.linker import Keep
from looseleaf.link.plan import Plan
from looseleaf.link.policies import Policy
from looseleaf.prompt.chunks import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """With a number: log-probabilities of each chosen token and of this many of the likeliest."""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check_whole("max_tokens", self.max_tokens, low=1)
        check_number("temperature", self.temperature, low=0)
        check_whole("top_k", self.top_k, low=0)
        check_truth("ignore_eos", self.ignore_eos)
        check_number("top_p", self.top_p, low=-math.inf)
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None:
            check_whole("seed", self.seed, low=-(2**63), high=2**64 - 1)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, low=0, high=100)
        if not isinstance(self.stop, tuple) or not all(isinstance(one, str) and one for one in self.stop):
            raise ConfigError(f"stop is a tuple of non-empty strings, got {self.stop!r}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the engine is asked: a built prompt, how to link it, how to answer it, what may be kept."""

    prompt: Prompt
    policy: Policy
    sampling: Sampling = field(default_factory=Sampling)
    keep: Keep = field(default_factory=Keep)
    held: Held | None = None
    """A window's own rows of the prompt's chunks: bound, and added to."""
    calibrated: bool = False
    """Whether what reuse costs on this model was measured."""
    prepare_s: float = 0.0
    """Seconds spent decoding media and tokenising, before the engine saw the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds to the first token by stage, and of the decoding behind it."""

    prepare_s: float = 0.0
    """Decoding media, rendering, tokenising."""
    queue_s: float = 0.0
    """Waiting for a place in the batch."""
    vision_s: float = 0.0
    """The vision tower, for chunks whose features were not stored."""
    chunks_s: float = 0.0
    """Chunks that were not stored, computed alone in the canonical context."""
    link_s: float = 0.0
    """Binding stored rows: rotating keys, copying values."""
    prefill_s: float = 0.0
    """The pass over the computed rows (other requests' rows in the same passes included)."""
    ttft_s: float = 0.0
    """From submit to the first token, preparation included."""
    decode_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """What an answer cost: tokens by what happened to them, and seconds."""

    prompt_tokens: int
    exact_tokens: int
    relocated_tokens: int
    kept_tokens: int
    """Rows a window kept, computed behind something else than stands there now."""
    patched_tokens: int
    recomputed_tokens: int
    fresh_tokens: int
    completion_tokens: int
    approximate: bool
    """Whether the answer rests on rows that were reused outside the context they were computed in."""
    calibrated: bool
    """Whether what that costs was measured on this model; exact answers need no measuring."""
    timing: Timing

    def __str__(self) -> str:
        kinds = (
            ("exact", self.exact_tokens), ("relocated", self.relocated_tokens),
            ("kept", self.kept_tokens),
            ("patched", self.patched_tokens), ("recomputed", self.recomputed_tokens), ("fresh", self.fresh_tokens),
        )  # fmt: skip
        tokens = " + ".join(f"{count} {name}" for name, count in kinds if count)
        stages = ", ".join(
            f"{name.removesuffix('_s')} {getattr(self.timing, name) * 1000:.1f}"
            for name in ("prepare_s", "queue_s", "vision_s", "chunks_s", "link_s", "prefill_s")
            if getattr(self.timing, name) >= 5e-5
        )
        kind = ("approximate" if self.calibrated else "approximate, not calibrated") if self.approximate else "exact"
        return (
            f"{self.prompt_tokens} prompt tokens ({tokens}; {kind}), {self.completion_tokens} answered; "
            f"first token after {self.timing.ttft_s * 1000:.1f} ms ({stages})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprob:
    """The log-probability of a chosen token, and of the likeliest ones at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    """stop (the model's end or a stop string) or length (max_tokens)."""
    usage: Usage
    plan: Plan
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Something happened to a request: a stage began, or text arrived."""

    stage: str = ""
    text: str = ""
    token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
