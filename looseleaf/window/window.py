"""A window: images, documents and words in order, and the rows each was computed to in it.

Pages behind one that leaves keep their rows, turned to where they stand then; what they absorbed from it stays with
them (unless told to forget). A page that returns is conditioned anew by what stands before it. Only what is missing is
computed, by the next question. Branches share everything until they differ.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from looseleaf.checks import check_whole
from looseleaf.engine.request import Answer
from looseleaf.errors import LimitError, PolicyError, PromptError
from looseleaf.link.held import Held
from looseleaf.link.plan import Plan
from looseleaf.link.policies import Auto, Policy, parse_policy, policy_name
from looseleaf.link.records import antecedents
from looseleaf.prompt.chunks import Chunk, Prompt, assemble
from looseleaf.prompt.media import read_picture
from looseleaf.prompt.segments import Clip, Document, Image, Segment
from looseleaf.system import Looseleaf
from looseleaf.window.page import Page
from looseleaf.window.saved import open_pages, save_pages

EVICTED = 256
"""Pages that can be recalled, at most; beyond it those that left first are let go."""
ORDERS = 5
"""Pages up to which `place` tries every order; beyond it takes the next best one by one."""


class Window:
    """A context to push to, slide, cut, reorder, branch and ask. Not for several threads at once."""

    def __init__(
        self, ll: Looseleaf, *, budget_tokens: int | None = None, budget_bytes: int | None = None,
        policy: Policy | str | None = None,
    ):  # fmt: skip
        """`budget_tokens`: beyond it the oldest pages leave; `budget_bytes`: of kept rows, beyond it the oldest go."""
        for name, value in (("budget_tokens", budget_tokens), ("budget_bytes", budget_bytes)):
            if value is not None:
                check_whole(name, value, low=0)
        self.ll = ll
        self.budget_tokens, self.budget_bytes = budget_tokens, budget_bytes
        self.policy = parse_policy(policy) if isinstance(policy, str) else policy or Auto()
        self._pages: list[Page] = []
        self._evicted: dict[int, Page] = {}
        self._last = 0
        """The number of the page that came last."""

    @property
    def pages(self) -> tuple[Page, ...]:
        """What is in it, in order."""
        return tuple(self._pages)

    @property
    def evicted(self) -> tuple[Page, ...]:
        """What can be recalled, in the order in which it left."""
        return tuple(self._evicted.values())

    @property
    def tokens(self) -> int:
        """Of everything in it, without the chat template and the question."""
        return sum(page.tokens for page in self._pages)

    @property
    def nbytes(self) -> int:
        """Bytes of kept rows."""
        return bytes_of([self])

    def push(self, segment: Segment) -> int:
        """Put an image, clip, document or words behind everything; returns its number. Computes nothing yet."""
        page = self._page(self._last + 1, segment)
        self._last = page.number
        self._pages.append(page)
        self._fit(keep=page.number)
        return page.number

    def drop(self, number: int) -> None:
        """Let go of an evicted page for good."""
        if self._evicted.pop(number, None) is None:
            raise PromptError(f"page {number} is not among the evicted ones ({self._known_evicted()})")

    def slide(self, count: int = 1, *, forget: bool | None = None) -> list[int]:
        """Evict the oldest pages, `count` of them not words, and the words before and between them."""
        check_whole("count", count, low=0)
        gone: list[int] = []
        while count and any(page.is_chunk for page in self._pages):
            page = self._pages[0]
            count -= page.is_chunk
            gone.append(page.number)
            self.evict(page.number, forget=forget)
        return gone

    def evict(self, number: int, *, forget: bool | None = None) -> None:
        """Take a page out; it can be recalled. Pages behind keep what they absorbed from it, or `forget` it.

        None: they forget where the calibration says that what stays does harm.
        """
        at = self._at(number)
        page = self._pages.pop(at)
        self._evicted[number] = replace(page, kept=None, lacks=frozenset())
        while len(self._evicted) > EVICTED:
            del self._evicted[next(iter(self._evicted))]
        calibration = self.ll.calibration
        if forget or (forget is None and calibration is not None and calibration.removal):
            self._pages[at:] = [replace(one, kept=None) for one in self._pages[at:]]

    def recall(self, number: int, *, at: int | None = None, cascade: bool = True) -> list[int]:
        """Bring an evicted page back at a place (None: the end), to be conditioned by what stands before it now.

        Returns the pages behind whose rows lack it: they are conditioned anew too, or left as they are.
        """
        if number not in self._evicted:
            raise PromptError(f"page {number} is not among the evicted ones ({self._known_evicted()})")
        at = len(self._pages) if at is None else at
        check_whole("at", at, low=0, high=len(self._pages))
        served = self._serving()
        self._pages.insert(at, self._evicted.pop(number))
        without = served - self._serving()
        content = self._contents().get(number, "")
        for place, page in enumerate(self._pages):
            if page.number in without:
                left = replace(page, lacks=page.lacks | {content})
                self._pages[place] = replace(page, kept=None) if cascade else left
        self._fit(keep=number)
        return [page.number for page in self._pages if page.number in without]

    def reorder(self, numbers: Sequence[int]) -> None:
        """Put all pages in this order."""
        if sorted(numbers) != sorted(page.number for page in self._pages):
            raise PromptError(
                f"reorder takes every page once ({[page.number for page in self._pages]}), got {list(numbers)}"
            )
        before = [page.number for page in self._pages]
        by_number = {page.number: page for page in self._pages}
        strict = "order" not in self.ll.tuned(self.policy).drifts
        for at, number in enumerate(numbers):
            if strict and set(before[: before.index(number)]) - set(numbers[:at]):
                # its rows absorbed what stands behind it now
                by_number[number] = replace(by_number[number], kept=None)
        self._pages = [by_number[number] for number in numbers]

    def replace(self, number: int, segment: Segment) -> None:
        """Put something else in a page's place; pages behind are conditioned anew."""
        at, page = self._at(number), self._page(number, segment)
        self._pages[at:] = [page, *(replace(one, kept=None) for one in self._pages[at + 1 :])]
        self._fit(keep=number)

    def fork(self) -> Window:
        """A branch: the same pages and rows, shared until one of the two changes."""
        other = Window(
            self.ll, budget_tokens=self.budget_tokens, budget_bytes=self.budget_bytes, policy=self.policy
        )  # fmt: skip
        other._pages, other._evicted, other._last = list(self._pages), dict(self._evicted), self._last
        return other

    def clean_view(self, *numbers: int) -> Window:
        """A branch in which these pages stand as they were computed alone: what others in front added is off."""
        other = self.fork()
        for number in numbers:
            at = other._at(number)
            if not other._pages[at].is_chunk:
                raise PromptError(f"page {number} is words: they are computed with every question")
            other._pages[at] = replace(other._pages[at], clean=True)
        return other

    def disposable(self, number: int, question: str, **options: Any) -> bool:
        """Whether a question gets the same answer without what the pages before this one added to it."""
        told = self.ask(question, **options)  # first: the view shares what this computes
        return told.token_ids == self.clean_view(number).ask(question, **options).token_ids

    def place(self, numbers: Sequence[int] | None = None) -> list[int]:
        """An order of these pages (None: all) in which the most patches that are stored hold."""
        wanted = [page.number for page in self._pages if page.is_chunk] if numbers is None else list(numbers)
        chosen = [self._pages[self._at(one)] for one in wanted]
        if not chosen or not all(page.is_chunk for page in chosen):
            raise PromptError(f"place takes pages that are not words, got {wanted}")
        built = self.ll.builder.build([*(page.segment for page in chosen), "."])
        if len(chosen) <= ORDERS:
            best = max(itertools.permutations(range(len(chosen))), key=lambda order: self._patches(built, order))
            return [wanted[at] for at in best]
        order: list[int] = []
        left = list(range(len(chosen)))
        while left:
            following = max(left, key=lambda at: self._patches(built, [*order, at]))
            order.append(following)
            left.remove(following)
        return [wanted[at] for at in order]

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer a question about everything in the window. Options as for `Looseleaf.ask`.

        Pages without rows are computed where they stand, and their rows kept.
        """
        policy = self._policy(options.pop("policy", None))
        built = self._built(question)
        held = self._held(built, policy)
        answer = self.ll.ask(built, held=held, policy=policy, **options)
        for place, at in enumerate(self._places()):
            page, rows = self._pages[at], held.rows.get(place) if held is not None else None
            if rows is not None and rows is not page.kept:
                self._pages[at] = replace(page, kept=rows, lacks=frozenset())
        self._fit_bytes()
        return answer

    def plan(self, question: str, **options: Any) -> Plan:
        """What a question would read and compute now."""
        policy = self._policy(options.pop("policy", None))
        built = self._built(question)
        return self.ll.plan(built, held=self._held(built, policy), policy=policy, **options)

    def save(self, folder: str | Path) -> None:
        """Write pages, evicted ones and kept rows into a folder."""
        save_pages(
            Path(folder), self.ll, self.pages, self.evicted,
            {"budget_tokens": self.budget_tokens, "budget_bytes": self.budget_bytes}, self.policy,
        )  # fmt: skip

    @classmethod
    def open(cls, ll: Looseleaf, folder: str | Path) -> Window:
        """A saved window; its rows too when the model, dtype and preamble are the ones they were computed by."""
        inside, outside, budgets, policy = open_pages(Path(folder), ll)
        window = cls(ll, policy=policy, **budgets)
        window._pages = [replace(page, tokens=window._tokens(page.segment)) for page in inside]
        window._evicted = {page.number: replace(page, tokens=window._tokens(page.segment)) for page in outside}
        window._last = max((page.number for page in (*inside, *outside)), default=0)
        return window

    def _at(self, number: int) -> int:
        for at, page in enumerate(self._pages):
            if page.number == number:
                return at
        raise PromptError(f"there is no page {number} in the window; there are {[page.number for page in self._pages]}")

    def _page(self, number: int, segment: Segment) -> Page:
        """A page that fits; decoded here, so that it stays what it is and what cannot be read fails now."""
        limits = self.ll.builder.limits
        if isinstance(segment, Image):
            segment = Image(read_picture(segment, limits).pixels)
        elif isinstance(segment, Clip):
            frames = [one if isinstance(one, Image) else Image(one) for one in segment.frames]
            segment = Clip([Image(read_picture(one, limits).pixels) for one in frames], segment.seconds_per_frame)
        elif not isinstance(segment, str | Document):
            raise PromptError(f"a window takes text, Image, Document or Clip, got {type(segment).__name__}")
        tokens = self._tokens(segment)
        if self.budget_tokens is not None and tokens > self.budget_tokens:
            raise LimitError(f"this page has {tokens:,} tokens, the window {self.budget_tokens:,}; raise budget_tokens")
        return Page(number=number, segment=segment, tokens=tokens)

    def _tokens(self, segment: Segment) -> int:
        if isinstance(segment, str):
            return len(self.ll.adapter.tokenizer(segment, add_special_tokens=False)["input_ids"])
        return sum(map(len, self.ll.builder.build([segment, "."]).chunks))

    def _known_evicted(self) -> str:
        return ", ".join(map(str, self._evicted)) or "none"

    def _policy(self, given: Policy | str | None) -> Policy:
        """A question's policy as the calibration sets it."""
        policy = self.ll.tuned(parse_policy(given) if isinstance(given, str) else given or self.policy)
        if not policy.relocate or policy.keys_rank is not None:
            raise PolicyError(f"a window binds rows where they stand now, which {policy_name(policy)} does not")
        if not policy.reuses_chunks and any(page.clean for page in self._pages):
            raise PolicyError(f"a clean view reuses images, which {policy_name(policy)} does not")
        return policy

    def _fit(self, *, keep: int) -> None:
        """Evict the oldest pages until the budget holds."""
        while self.budget_tokens is not None and self.tokens > self.budget_tokens and len(self._pages) > 1:
            self.evict(next(page.number for page in self._pages if page.number != keep))

    def _fit_bytes(self) -> None:
        """Let go of the oldest kept rows until the budget holds; they are patched or computed again when asked for."""
        for at, page in enumerate(self._pages):
            if self.budget_bytes is None or self.nbytes <= self.budget_bytes:
                return
            self._pages[at] = replace(page, kept=None)

    def _places(self) -> list[int]:
        """Which page each of the prompt's chunks is."""
        return [at for at, page in enumerate(self._pages) if page.is_chunk]

    def _built(self, question: str) -> Prompt:
        if not isinstance(question, str) or not question.strip():
            raise PromptError(f"a window is asked a question in words, got {question!r}")
        return self.ll.builder.build([*(page.segment for page in self._pages), question])

    def _contents(self) -> dict[int, str]:
        """By a page's number: its content as it stands in the window, for all but words."""
        spans = self._built(".").chunks
        return {self._pages[at].number: span.chunk.content for at, span in zip(self._places(), spans, strict=True)
                if span.chunk is not None}  # fmt: skip

    def _serving(self) -> set[int]:
        """Pages whose kept rows serve where they stand."""
        held = self._held(self._built("."), self.ll.tuned(self.policy))
        return {self._pages[at].number for place, at in enumerate(self._places()) if held and place in held.rows}

    def _held(self, built: Prompt, policy: Policy) -> Held | None:
        """What a question binds of the window's own rows; None for a policy that reuses nothing."""
        if not policy.reuses_chunks:
            return None
        before, held = antecedents(built), Held()
        for place, (at, span) in enumerate(zip(self._places(), built.chunks, strict=True)):
            page, kept = self._pages[at], self._pages[at].kept
            assert span.chunk is not None
            if kept is None or kept.content != span.chunk.content or kept.rows.tokens != len(span) or page.clean:
                continue
            if _serves(kept.antecedent.chunks, before[span.start].chunks, page.lacks, policy.drifts):
                held.rows[place] = kept
        held.clean = frozenset(place for place, at in enumerate(self._places()) if self._pages[at].clean)
        return held

    def _patches(self, built: Prompt, order: Sequence[int]) -> int:
        """How many of a prompt's chunks would have a patch in the store, these of them in this order."""
        chunks = iter([built.chunks[at].chunk for at in order])
        pieces: list[tuple[int, ...] | Chunk] = []
        for span in built.spans:
            if span.chunk is None:
                pieces.append(built.ids[span.start : span.stop])
            elif (chunk := next(chunks, None)) is not None:
                pieces.append(chunk)
        known = self.ll.linker.lookup(assemble(pieces, axes=self.ll.adapter.axes), self.ll.tuned(self.policy))
        return sum(one.patch != "" for one in known.chunks)


def _serves(made: Sequence[str], now: Sequence[str], lacks: frozenset[str], drifts: Sequence[str]) -> bool:
    """Whether rows computed behind some contents may stand behind others.

    Nothing new may stand in front but what they are allowed to lack. What does not stand there any more is remembered;
    the rest must be in the same order, unless another is allowed.
    """
    now = [one for one in now if one not in lacks]
    if Counter(now) - Counter(made):
        return False
    left = list(made)
    for gone in (Counter(made) - Counter(now)).elements():
        left.remove(gone)
    return left == now or "order" in drifts


def bytes_of(windows: Sequence[Window]) -> int:
    """Bytes of the rows some windows keep, those they share counted once."""
    rows = {id(page.kept.rows): page.kept.rows for one in windows for page in one.pages if page.kept is not None}
    return sum(one.nbytes for one in rows.values())
