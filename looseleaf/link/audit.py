"""Audit: a sample of live answers that rest on approximate rows is compared with re-prefill, when nobody waits.

A calibration was measured once, on drawings; this is measured on what users ask. Kept of an audited answer are its
first tokens and the logits they were chosen from.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from looseleaf.link.linker import Keep
from looseleaf.link.plan import Plan
from looseleaf.link.policies import Reprefill
from looseleaf.link.reference import Reference, Way, divergence
from looseleaf.prompt.chunks import Prompt

log = logging.getLogger(__name__)

TOKENS = 16
"""Of an answer that are compared, at most."""
WAITING = 16
"""Answers that wait to be compared, at most; beyond it the oldest are let go."""


@dataclass
class AuditCounters:
    """What came of it."""

    answers: int = 0
    changed: int = 0
    """Of them, how many re-prefill would have begun otherwise, greedily, at one of the places compared."""
    tokens: int = 0
    kl: float = 0.0
    """Nats a token, mean over all tokens compared."""
    worst_kl: float = 0.0
    """Of one answer."""
    dropped: int = 0
    failed: int = 0


@dataclass(frozen=True, kw_only=True)
class _Heard:
    prompt: Prompt
    answer: tuple[int, ...]
    logits: Tensor
    keep: Keep


class Audit:
    """Answers on their way to being compared. Used by the engine alone, under its lock."""

    def __init__(self, reference: Reference, share: float, *, seed: int = 0):
        self._reference, self._share = reference, share
        self._chance = Random(seed)
        self._waiting: deque[_Heard] = deque()
        self.counters = AuditCounters()

    @property
    def waiting(self) -> int:
        """Answers still to be compared."""
        return len(self._waiting)

    def picks(self, plan: Plan) -> bool:
        """Whether an answer by this plan shall be compared."""
        return plan.approximate and self._chance.random() < self._share

    def note(self, prompt: Prompt, answer: tuple[int, ...], logits: list[Tensor], keep: Keep) -> None:
        """Write down an answer's tokens and the logits [vocabulary] each was chosen from."""
        kept = torch.stack(logits).float().cpu()
        self._waiting.append(_Heard(prompt=prompt, answer=answer[: len(logits)], logits=kept, keep=keep))
        if len(self._waiting) > WAITING:
            self._waiting.popleft()
            self.counters.dropped += 1

    @torch.inference_mode()
    def work(self) -> bool:
        """Compare one answer; False when none waits."""
        if not self._waiting:
            return False
        one = self._waiting.popleft()
        try:
            way = Way(prompt=one.prompt, policy=Reprefill(), answer=one.answer, keep=one.keep)
            self._count(self._reference.along([way])[0].cpu(), one.logits)
        except Exception:
            log.exception("an answer could not be audited")
            self.counters.failed += 1
        return True

    def clear(self) -> None:
        """Let go of everything that waits."""
        self._waiting.clear()

    def _count(self, expected: Tensor, heard: Tensor) -> None:
        counters, kl, tokens = self.counters, divergence(expected, heard), len(heard)
        counters.kl = (counters.kl * counters.tokens + kl * tokens) / (counters.tokens + tokens)
        counters.tokens += tokens
        counters.answers += 1
        counters.changed += bool((expected.argmax(-1) != heard.argmax(-1)).any())
        counters.worst_kl = max(counters.worst_kl, kl)
