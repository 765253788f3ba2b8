"""Logits → next tokens. Greedy rows are chosen together; others one by one, each from its own generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.engine.request import Sampling, TokenLogprob
from looseleaf.errors import ModelError

COLD = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


def make_generator(sampling: Sampling, device: torch.device) -> torch.Generator | None:
    """A request's own source of chance; with a seed its answer does not depend on what else is running."""
    if sampling.temperature < COLD:
        return None
    generator = torch.Generator(device=device)
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


@dataclass(frozen=True, slots=True)
class Choice:
    """A row's next token, with log-probabilities where asked for; or why it has none."""

    token: int
    note: TokenLogprob | None = None
    error: Exception | None = None


def choose(logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator | None]) -> list[Choice]:
    """The next token of every row [row, vocabulary]. A row whose draw fails does not disturb the others."""
    best = logits.max(dim=-1)  # a NaN is the largest
    tokens, sizes = torch.stack((best.indices.double(), best.values.double())).tolist()
    return [
        _choose_row(logits[row], int(token), sampling, generator) if math.isfinite(size)
        else Choice(int(token), error=ModelError("the model gave logits that are not numbers"))
        for row, (token, size, sampling, generator) in enumerate(
            zip(tokens, sizes, samplings, generators, strict=True)
        )
    ]  # fmt: skip


def _choose_row(logits: Tensor, likeliest: int, sampling: Sampling, generator: torch.Generator | None) -> Choice:
    try:
        token = likeliest if generator is None else int(_draw(logits.float(), sampling, generator))
        note = None if sampling.logprobs is None else _note(logits, token, sampling.logprobs)
    except RuntimeError as error:
        return Choice(likeliest, error=error)
    return Choice(token, note)


def _draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    scaled = logits / sampling.temperature
    if 0 < sampling.top_k < len(scaled):
        scaled[scaled < torch.topk(scaled, sampling.top_k).values[-1]] = -torch.inf
    odds = torch.softmax(scaled, dim=-1)
    if sampling.top_p < 1:
        ordered, order = odds.sort(descending=True)
        beyond = ordered.cumsum(dim=-1) - ordered >= sampling.top_p  # the token that crosses top_p stays
        odds[order[beyond]] = 0
    return torch.multinomial(odds, 1, generator=generator)[0]


def _note(logits: Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.topk(logprobs, count)
    top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprob(token_id=token, logprob=logprobs[token].item(), top=top)
