"""Asking under policies: the answers, the seconds and the tokens computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from looseleaf.bench.report import Share
from looseleaf.demo.items import Item
from looseleaf.engine.request import Answer
from looseleaf.link.plan import Plan
from looseleaf.link.policies import (
    DeepLayers,
    Deviation,
    FirstK,
    FullReuse,
    LayerAdaptive,
    Patched,
    Policy,
    PrefixCache,
    Reprefill,
    policy_name,
)
from looseleaf.prompt.segments import PromptLike, Segment
from looseleaf.system import Looseleaf

PARTIAL = ("first-k", "deviation", "layer-adaptive", "deep-layers")
"""Policies shown that compute some of each image again: half of it."""

LONGEST = 24
"""Tokens of an answer: a harmless sentence has 10."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A question that was asked under a policy, and what came of it."""

    policy: str
    item: Item
    answer: Answer
    layers: int

    @property
    def said(self) -> str:
        """The answer's words."""
        return self.answer.text.strip()

    @property
    def right(self) -> bool:
        """Whether these are exactly the right words."""
        return self.said == self.item.question.answer

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.answer.usage.timing.ttft_s

    @property
    def computed(self) -> float:
        """Prompt tokens that went through a layer, on average over the layers."""
        return computed_tokens(self.answer.plan, self.layers)


def share(asked: Iterable[Asked]) -> Share:
    """Of right answers."""
    marks = [one.right for one in asked]
    return Share(right=sum(marks), n=len(marks))


def policies_for(ll: Looseleaf, images: Sequence[Segment]) -> dict[str, Policy]:
    """What is compared, by name; those that recompute some of each image are set to half of it.

    The offline controls are left out: they cost a full prefill, so that there is nothing to time.
    """
    chunks = ll.builder.build([*images, "?"]).chunks
    half = max(len(span) for span in chunks) // 2
    shown = (
        Reprefill(), PrefixCache(), FullReuse(), FirstK(k=half), Deviation(ratio=0.5), LayerAdaptive(ratio=0.5),
        DeepLayers(from_layer=_layers(ll) // 2), Patched(),
    )  # fmt: skip
    return {policy_name(policy).partition(":")[0]: policy for policy in shown}


def store(ll: Looseleaf, images: Sequence[Segment]) -> None:
    """Compute each image alone, once, and keep what every policy may want of it."""
    ll.warm(images, layers=(_layers(ll) // 2,))


def teach(ll: Looseleaf, prompt: PromptLike, policies: Iterable[Policy]) -> None:
    """See a prompt once under each policy that patches: it computes the images in context and leaves patches behind."""
    for policy in policies:
        if policy.patch is not None:
            ll.ask(prompt, policy=policy, max_tokens=1)
    ll.settle()


def ask_alone(ll: Looseleaf, item: Item, prompt: PromptLike, name: str, policy: Policy, *, keep: bool = False) -> Asked:
    """Ask and wait: the seconds are this request's own. Without `keep` the next request finds the store as this did."""
    answer = ll.ask(prompt, policy=policy, max_tokens=LONGEST, no_store=not keep)
    return Asked(policy=name, item=item, answer=answer, layers=_layers(ll))


def ask_together(ll: Looseleaf, prompts: Sequence[tuple[Item, PromptLike]], policies: dict[str, Policy]) -> list[Asked]:
    """Ask every prompt under every policy in one batch: quicker, for answers only."""
    waiting = [
        (name, item, ll.submit(prompt, policy=policy, max_tokens=LONGEST, no_store=True))
        for item, prompt in prompts
        for name, policy in policies.items()
    ]
    return [Asked(policy=name, item=item, answer=reply.result(), layers=_layers(ll)) for name, item, reply in waiting]


def computed_tokens(plan: Plan, layers: int) -> float:
    """Rows a plan computes in a layer, on average over the layers."""
    movable = sum(piece.stop - piece.start for piece in plan.pieces if piece.use == "reuse" and not piece.exact)
    starts = [rows.layer for rows in plan.rows] + [layers]
    total = 0.0
    for rows, stop in zip(plan.rows, starts[1:], strict=True):
        chosen = rows.select.share * movable if rows.select is not None else 0.0
        total += (sum(map(len, rows.slots)) + chosen) * (stop - rows.layer)
    return total / layers


def _layers(ll: Looseleaf) -> int:
    return len(ll.adapter.layout.layers)
