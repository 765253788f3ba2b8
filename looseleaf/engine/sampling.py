"""Logits → next tokens. Greedy rows are chosen together; others one by one, each from its own generator."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from looseleaf.engine.request import Sampling, TokenLogprob

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


def choose(
    logits: Tensor, samplings: Sequence[Sampling], generators: Sequence[torch.Generator | None]
) -> tuple[list[int], list[TokenLogprob | None]]:
    """The next token of every row [row, vocabulary], with log-probabilities where asked for."""
    chosen = logits.argmax(dim=-1)
    for row, (sampling, generator) in enumerate(zip(samplings, generators, strict=True)):
        if generator is not None:
            chosen[row] = _draw(logits[row].float(), sampling, generator)
    tokens = chosen.tolist()
    notes = [
        None if sampling.logprobs is None else _note(logits[row], tokens[row], sampling.logprobs)
        for row, sampling in enumerate(samplings)
    ]
    return tokens, notes


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
