"""Patches made by hand for a prompt's chunks, and what an answer loses with them: what the benches about patches share.

A case is a prompt computed in context once: the answer, its distributions, and every chunk's rows there and alone. An
arm is blind reuse with patches put on, or a policy; it is compared along re-prefill's own answer, so that greedy
decoding would repeat that answer exactly when its token is the likeliest at every place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from looseleaf.bench.reuse import MAX_TOKENS, Item, divergence
from looseleaf.engine.request import Request
from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import ChunkKV, Patch
from looseleaf.link.linker import Keep
from looseleaf.link.policies import FullReuse, Policy, Reprefill
from looseleaf.patch.deficit import Deficit, find_deficit
from looseleaf.prompt.chunks import Prompt, Span
from looseleaf.system import Looseleaf

Patches = Mapping[int, Patch]
"""By a chunk's first slot."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A prompt computed in context."""

    prompt: Prompt
    told: tuple[int, ...]
    """Re-prefill's answer."""
    right: bool | None
    """Whether that is the right one; None where nobody knows."""
    answer: str
    ceiling: Tensor
    """[answered token, vocabulary]"""
    conditioned: Mapping[int, KVRows]
    """By a chunk's first slot: its rows in this context, keys un-rotated."""
    alone: Mapping[int, KVRows]

    def deficits(self) -> dict[int, Deficit]:
        """What context adds to each chunk."""
        return {start: find_deficit(rows, self.alone[start]) for start, rows in self.conditioned.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One case under one arm."""

    kl: float
    changed: bool
    right: bool


def make_case(ll: Looseleaf, item: Item) -> Case:
    """Compute an item's prompt in context, its chunks alone, and re-prefill's answer."""
    ll.warm(item.chunks)
    prompt = ll.builder.build(item.prompt)
    answer = ll.ask(item.prompt, policy=Reprefill(), max_tokens=MAX_TOKENS)
    rows = in_context(ll, prompt)
    alone = {}
    for span in prompt.chunks:
        assert span.chunk is not None
        record = ll.store.get(ll.linker.keys.kv(span.chunk))
        assert isinstance(record, ChunkKV), "the chunk is not stored: there is nothing to compare with"
        alone[span.start] = record.rows
    return Case(
        prompt=prompt, told=answer.token_ids, right=answer.text.strip() == item.question.answer,
        answer=item.question.answer, ceiling=ll.reference.along(prompt, Reprefill(), answer.token_ids),
        conditioned={span.start: part(rows, span) for span in prompt.chunks}, alone=alone,
    )  # fmt: skip


@torch.inference_mode()
def in_context(ll: Looseleaf, prompt: Prompt) -> KVRows:
    """Rows of a whole prompt as a plain prefill computes them, keys un-rotated."""
    plan = ll.engine.plan(Request(prompt=prompt, policy=Reprefill()))
    linked = ll.linker.link(prompt, plan, capacity=len(prompt), keep=Keep())
    lane = linked.take(len(prompt))
    rows = KVRows(ll.adapter.layout, len(prompt), ll.adapter.device)
    lane.capture = Capture(rows=rows)
    ll.adapter.decoder.run([lane])
    linked.release()
    return rows


def part(rows: KVRows, span: Span) -> KVRows:
    """A span's rows of a prompt's, as views."""
    return KVRows.of_views(
        rows.layout,
        [one[:, span.start : span.stop] for one in rows.keys],
        [one[:, span.start : span.stop] for one in rows.values],
    )


def try_patches(ll: Looseleaf, case: Case, patches: Patches) -> Arm:
    """Every chunk relocated, those that have one with their patch put on."""

    def along(tokens: Sequence[int]) -> Tensor:
        return ll.reference.along(
            case.prompt, FullReuse(), tokens, tamper=lambda linked: linked.patches.update(patches)
        )

    return _judge(ll, case, along(case.told), along)


def try_policy(ll: Looseleaf, case: Case, policy: Policy) -> Arm:
    """The prompt linked by a policy."""

    def along(tokens: Sequence[int]) -> Tensor:
        return ll.reference.along(case.prompt, policy, tokens)

    return _judge(ll, case, along(case.told), along)


def _judge(ll: Looseleaf, case: Case, logits: Tensor, along: object) -> Arm:
    changed = logits.argmax(-1).tolist() != list(case.told)
    right = bool(case.right) and not changed
    if changed and not case.right and callable(along):  # another answer than re-prefill's wrong one may be right
        tokenizer = ll.adapter.tokenizer
        wanted = tokenizer(case.answer, add_special_tokens=False)["input_ids"]
        ends = along([*wanted, min(ll.adapter.eos_ids)]).argmax(-1).tolist()
        right = ends[:-1] == wanted and ends[-1] in ll.adapter.eos_ids
    return Arm(kl=divergence(case.ceiling, logits), changed=changed, right=right)


def eta(arms: Sequence[Arm], blind: Sequence[Arm]) -> float | None:
    """Share of blind reuse's KL that an arm closes, over the same cases; None where there is next to none."""
    lost = sum(one.kl for one in blind)
    return 1 - sum(one.kl for one in arms) / lost if lost > 1e-3 * len(blind) else None
