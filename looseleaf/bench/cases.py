"""Held-out questions, each computed in context once, and what an answer loses when it is reached another way.

A case is a question's prompt with re-prefill's answer, its distributions, and every chunk's rows there and alone. A way
is a policy, or blind reuse with patches made by hand. Both are compared along re-prefill's own answer: greedy decoding
repeats that answer exactly when its token is the likeliest at every place. Many cases share a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any, TypeVar

from torch import Tensor

from looseleaf.engine.request import Answer
from looseleaf.errors import ConfigError
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import ChunkKV, Patch
from looseleaf.link.policies import FullReuse, Policy, Reprefill
from looseleaf.link.reference import Way, divergence
from looseleaf.patch.deficit import Deficit, find_deficit
from looseleaf.prompt.chunks import Prompt, Span
from looseleaf.prompt.segments import Document, Segment
from looseleaf.system import Looseleaf
from looseleaf.workloads.albums import HEADLINE, as_segment, headline_question, task_album
from looseleaf.workloads.bounds import HELD_OUT, Bounds
from looseleaf.workloads.questions import Question, Size, held_out

CONTROL = "documents as text"
MAX_TOKENS = 16
LITTLE = 1e-3
"""Nats: a smaller loss is none, and a share of it would mean nothing."""
TOGETHER = 8
"""Cases that share a pass."""
ATTEMPTS = 100
"""Albums drawn until one has the question wanted."""
OPENINGS = ("", "", "Look at these. ", "Please look: ")
GAPS = ("", "", "", " and ", "\n", " Here is one more. ", " The next one: ", " Keep it in mind. ")
"""Words before the first entry, and between two."""

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question about an album: its pictures and pages, and the prompt that shows them."""

    chunks: list[Segment]
    prompt: list[Segment]
    question: Question

    def behind(self, chunks: Sequence[Segment]) -> Item:
        """The same question behind these chunks and no words."""
        return replace(self, chunks=list(chunks), prompt=[*chunks, self.question.text])


@dataclass(frozen=True, kw_only=True)
class Case:
    """An item's prompt computed in context."""

    item: Item
    prompt: Prompt
    told: tuple[int, ...]
    """Re-prefill's answer."""
    right: bool
    """Whether that is the right one."""
    ceiling: Tensor
    """[answered token, vocabulary]"""
    conditioned: Mapping[int, KVRows]
    """By a chunk's first slot: its rows in this context, keys un-rotated."""
    alone: Mapping[int, KVRows]

    @cached_property
    def deficits(self) -> dict[int, Deficit]:
        """What context adds to each chunk."""
        return {start: find_deficit(rows, self.alone[start]) for start, rows in self.conditioned.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One case reached one way."""

    right: bool
    kl: float
    changed: bool
    """Whether re-prefill says something else."""
    reused: float = 0.0
    """Share of the prompt's tokens that were read, not computed."""
    rank: float = 0.0
    """Of the patches put on, mean over chunks and patched layers; of keys or values, whichever have more."""
    share: float = 0.0
    """Bytes of the patches put on, of their pages'."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one question: a case reached in several ways."""

    cell: Any
    """The figures it counts for."""
    arms: Mapping[Any, Arm]


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How many questions of a kind are asked, and which of them here: every `of`-th round from `part` on."""

    count: int
    seed: int = 0
    part: int = 0
    of: int = 1
    tell: Callable[[str], None] = lambda stage: None


def bounds_of(ll: Looseleaf) -> Bounds:
    """What a model's family is measured on."""
    family = ll.adapter.model.config.model_type
    if family not in HELD_OUT:
        raise ConfigError(f"this bench has no questions for {family} models; it has some for {', '.join(HELD_OUT)}")
    return HELD_OUT[family]


def tasks(bounds: Bounds) -> list[str]:
    """The tasks a model was trained on."""
    return [task for task in HEADLINE if bounds.counts_of(task)]


def items(bounds: Bounds, task: str, hops: int, count: int, seed: int) -> list[Item]:
    """`count` held-out questions, each about an album of its own."""
    return [draw(bounds, task, hops, seed, number) for number in range(count)]


def draw(bounds: Bounds, task: str, hops: int, seed: int, number: int) -> Item:
    """The question of that number, some words around its pictures."""
    frames = task in ("clip", "stream")
    size = (bounds.frame_side,) * 2 if frames else bounds.sizes[number % len(bounds.sizes)]
    chunks, question, chance = album_about(task, hops, size, bounds.counts_of(task), "reuse", seed, task, hops, number)
    prompt: list[Segment] = []
    for chunk in chunks:
        words = chance.choice(GAPS if prompt else OPENINGS)
        words = words.rstrip(" ") if isinstance(chunk, Document) else words  # a page starts a line of its own
        prompt += [words, chunk] if words else [chunk]
    return Item(chunks=chunks, prompt=[*prompt, question.text], question=question)


def album_about(
    task: str, hops: int, size: Size, counts: Sequence[int], *seed: str | int
) -> tuple[list[Segment], Question, Random]:
    """Chunks with such a question, and the chance they were drawn by; an album that has none is drawn again."""
    split = held_out()
    for attempt in range(ATTEMPTS):
        chance = split.chance(*seed, attempt)
        album = task_album(task, chance, split, size, chance.choice(counts))
        question = headline_question(task, hops, album, chance, split)
        if question is not None:
            return [as_segment(entry) for entry in album.entries], question, chance
    raise AssertionError(f"{ATTEMPTS} albums and none has a question about {task} of {hops} hops")


def rounds(bounds: Bounds, task: str, hops: int, asking: Asking) -> Iterator[tuple[int, list[Item]]]:
    """Questions of a task a few at a time, rounds numbered from 0, with a word on how far it is."""
    for number in range(asking.part, math.ceil(asking.count / TOGETHER), asking.of):
        first = number * TOGETHER
        asking.tell(f"{task}, {'single' if hops == 1 else 'multi'}-hop, question {first + 1} of {asking.count}")
        numbers = range(first, min(first + TOGETHER, asking.count))
        yield number, [draw(bounds, task, hops, asking.seed, at) for at in numbers]


def possible(changed: Iterable[Item | None], of: Sequence[T]) -> tuple[list[Item], list[T]]:
    """Items that could be changed as wanted, and what belongs to each."""
    both = [(item, one) for item, one in zip(changed, of, strict=True) if item is not None]
    return [item for item, _ in both], [one for _, one in both]


def by_cell(outcomes: Iterable[Outcome]) -> dict[Any, dict[Any, list[Arm]]]:
    """Arms by what they count for; those of one cell stand in the same order of questions."""
    found: dict[Any, dict[Any, list[Arm]]] = {}
    for one in outcomes:
        cell = found.setdefault(one.cell, {})
        for name, arm in one.arms.items():
            cell.setdefault(name, []).append(arm)
    return found


def make_cases(ll: Looseleaf, asked: Sequence[Item], *, layers: Sequence[int] = ()) -> list[Case]:
    """Compute items' prompts in context, their chunks alone (with states at `layers`), and re-prefill's answers."""
    ll.warm([chunk for item in asked for chunk in item.chunks], layers=layers)
    requests = [ll.request(item.prompt, policy=Reprefill(), max_tokens=MAX_TOKENS) for item in asked]
    answers = answer_all(ll, asked)
    caught = [KVRows(ll.adapter.layout, len(one.prompt), ll.adapter.device) for one in requests]
    ways = [
        Way(prompt=one.prompt, policy=Reprefill(), answer=answer.token_ids, rows=rows)
        for one, answer, rows in zip(requests, answers, caught, strict=True)
    ]
    ceilings = ll.reference.along(ways)
    return [
        Case(
            item=item, prompt=one.prompt, told=answer.token_ids, right=answer.text.strip() == item.question.answer,
            ceiling=ceiling,
            conditioned={span.start: rows.part(span.start, span.stop) for span in one.prompt.chunks},
            alone={span.start: rows_alone(ll, span) for span in one.prompt.chunks},
        )
        for item, one, answer, ceiling, rows in zip(asked, requests, answers, ceilings, caught, strict=True)
    ]  # fmt: skip


def answer_all(ll: Looseleaf, asked: Sequence[Item]) -> list[Answer]:
    """Re-prefill's greedy answers of the engine, in one batch."""
    replies = [ll.submit(item.prompt, policy=Reprefill(), max_tokens=MAX_TOKENS) for item in asked]
    return [reply.result() for reply in replies]


def rows_alone(ll: Looseleaf, span: Span) -> KVRows:
    """A stored chunk's rows."""
    assert span.chunk is not None
    record = ll.store.get(ll.linker.keys.kv(span.chunk))
    assert isinstance(record, ChunkKV), "the chunk is not stored: there is nothing to compare with"
    return record.rows


@dataclass(frozen=True, kw_only=True)
class Try:
    """A way to a case's answer: a policy, and patches put on by hand."""

    policy: Policy = field(default_factory=FullReuse)
    patches: Mapping[int, Patch] = field(default_factory=dict)
    """By a chunk's first slot."""
    prompt: Prompt | None = None
    """Instead of the case's own."""
    max_rows: int | None = None

    @property
    def rank(self) -> float:
        """Mean of its patches' ranks, of keys or values, whichever have more; 0 without patches."""
        both = ([patch.keys for patch in self.patches.values()], [patch.values for patch in self.patches.values()])
        kept = [[one.rank for planes in each for one in planes if one is not None] for each in both]
        return max((sum(ranks) / len(ranks) for ranks in kept if ranks), default=0.0)

    def way(self, case: Case, answer: Sequence[int]) -> Way:
        """As the reference takes it."""
        return Way(
            prompt=self.prompt or case.prompt, policy=self.policy, answer=tuple(answer), patches=self.patches,
            max_rows=self.max_rows,
        )  # fmt: skip


def try_all(ll: Looseleaf, cases: Sequence[Case], tries: Sequence[Mapping[K, Try]]) -> list[dict[K, Arm]]:
    """Every case in each of its ways, all in one pass; a second for answers that changed from a wrong one."""
    flat = [(at, name, one) for at, ways in enumerate(tries) for name, one in ways.items()]
    logits = ll.reference.along([one.way(cases[at], cases[at].told) for at, _, one in flat])
    changed = [one.argmax(-1).tolist() != list(cases[at].told) for (at, _, _), one in zip(flat, logits, strict=True)]
    open_ = [number for number, (at, _, _) in enumerate(flat) if changed[number] and not cases[at].right]
    wanted = {at: _wanted(ll, cases[at]) for at in {flat[number][0] for number in open_}}
    said = ll.reference.along(
        [flat[number][2].way(cases[flat[number][0]], wanted[flat[number][0]]) for number in open_]
    )
    found: list[dict[K, Arm]] = [{} for _ in cases]
    for number, ((at, name, one), its) in enumerate(zip(flat, logits, strict=True)):
        case = cases[at]
        right = case.right and not changed[number]
        if number in open_:
            *words, end = said[open_.index(number)].argmax(-1).tolist()
            right = words == wanted[at][:-1] and end in ll.adapter.eos_ids
        found[at][name] = Arm(
            right=right, kl=divergence(case.ceiling, its), changed=changed[number], reused=_reused(ll, case, one),
            rank=one.rank, share=_share(case, one),
        )  # fmt: skip
    return found


def _wanted(ll: Looseleaf, case: Case) -> list[int]:
    """The right answer's tokens, and one that ends it."""
    ids = ll.adapter.tokenizer(case.item.question.answer, add_special_tokens=False)["input_ids"]
    return [*ids, min(ll.adapter.eos_ids)]


def _reused(ll: Looseleaf, case: Case, one: Try) -> float:
    count = ll.linker.plan(case.prompt, one.policy).count()
    return (count.exact + count.relocated + count.patched) / len(case.prompt)


def _share(case: Case, one: Try) -> float:
    pages = sum(case.alone[start].nbytes for start in one.patches if start in case.alone)
    return sum(patch.nbytes for patch in one.patches.values()) / pages if pages else 0.0


def flips(blind: Sequence[Arm]) -> int:
    """Answers that blind reuse changes."""
    return sum(one.changed for one in blind)


def restored(arms: Sequence[Arm], blind: Sequence[Arm]) -> int:
    """Of those, the ones that another way leaves as they were."""
    return sum(other.changed and not one.changed for one, other in zip(arms, blind, strict=True))


def closed(kl: float, blind: float, noise: float = 0.0) -> float | None:
    """η, the share of blind reuse's KL an arm closes; None where blind reuse loses nothing worth closing."""
    return 1 - kl / blind if blind > max(noise, LITTLE) else None


def mean_kl(arms: Sequence[Arm]) -> float:
    """Over cases."""
    return sum(one.kl for one in arms) / len(arms)
