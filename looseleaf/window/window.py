"""A window: images, documents and words in order, and the rows each was computed to in it.

Pages behind one that leaves keep their rows, turned to where they stand then; what they absorbed from it stays with
them (unless told to forget). A page that returns is conditioned anew by what stands before it. Only what is missing is
computed, by the next question. Branches share everything until they differ.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from looseleaf.checks import check_whole
from looseleaf.engine.request import Answer
from looseleaf.errors import LimitError, PromptError
from looseleaf.link.held import Conditioned, Held
from looseleaf.link.plan import Plan
from looseleaf.link.policies import Auto, Policy, parse_policy
from looseleaf.link.records import Antecedent, antecedents
from looseleaf.prompt.chunks import Prompt
from looseleaf.prompt.segments import Clip, Document, Image, Segment
from looseleaf.system import Looseleaf
from looseleaf.window.saved import SavedPage, open_pages, save_pages

ORDERS = 5
"""Pages up to which `place` tries every order; beyond it takes the next best one by one."""


@dataclass(frozen=True, kw_only=True)
class Page:
    """Something in a window, or evicted from it: frozen, so that branches can share it."""

    number: int
    segment: Segment
    tokens: int
    kept: Conditioned | None = None
    """Its rows as they were computed in this window; None until a question needed them, and for words."""
    clean: bool = False
    """Whether it is shown as it was computed alone."""
    lacking: bool = False
    """Whether its rows serve although something new stands before it."""

    @property
    def is_chunk(self) -> bool:
        """Whether it has rows of its own: all but words."""
        return not isinstance(self.segment, str)


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
        self._numbers = itertools.count(1)

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
        page = Page(number=next(self._numbers), segment=segment, tokens=self._tokens(segment))
        self._pages.append(page)
        self._fit(keep=page.number)
        return page.number

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
        self._evicted[number] = replace(page, kept=None, lacking=False)
        calibration = self.ll.calibration
        if forget or (forget is None and calibration is not None and calibration.removal):
            self._pages[at:] = [replace(one, kept=None) for one in self._pages[at:]]

    def recall(self, number: int, *, at: int | None = None, cascade: bool = True) -> list[int]:
        """Bring an evicted page back at a place (None: the end), to be conditioned by what stands before it now.

        Returns the pages behind whose rows lack it: they are conditioned anew too, or left as they are.
        """
        if number not in self._evicted:
            known = ", ".join(map(str, self._evicted)) or "none"
            raise PromptError(f"page {number} is not among the evicted ones ({known})")
        at = len(self._pages) if at is None else at
        check_whole("at", at, low=0, high=len(self._pages))
        self._pages.insert(at, self._evicted.pop(number))
        behind = [page.number for page in self._pages[at + 1 :] if page.kept is not None]
        if not cascade:
            self._pages[at + 1 :] = [replace(page, lacking=True) for page in self._pages[at + 1 :]]
        self._fit(keep=number)
        return [one for one in behind if any(page.number == one for page in self._pages)]

    def reorder(self, numbers: Sequence[int]) -> None:
        """Put all pages in this order."""
        if sorted(numbers) != sorted(page.number for page in self._pages):
            raise PromptError(
                f"reorder takes every page once ({[page.number for page in self._pages]}), got {list(numbers)}"
            )
        by_number = {page.number: page for page in self._pages}
        self._pages = [by_number[number] for number in numbers]

    def replace(self, number: int, segment: Segment) -> None:
        """Put something else in a page's place; pages behind are conditioned anew."""
        at, tokens = self._at(number), self._tokens(segment)
        self._pages[at] = Page(number=number, segment=segment, tokens=tokens)
        self._fit(keep=number)

    def fork(self) -> Window:
        """A branch: the same pages and rows, shared until one of the two changes."""
        other = Window(
            self.ll, budget_tokens=self.budget_tokens, budget_bytes=self.budget_bytes, policy=self.policy
        )  # fmt: skip
        other._pages, other._evicted = list(self._pages), dict(self._evicted)
        following = max((page.number for page in (*self._pages, *self._evicted.values())), default=0) + 1
        other._numbers = itertools.count(following)
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
        told, without = (one.ask(question, **options) for one in (self, self.clean_view(number)))
        return told.token_ids == without.token_ids

    def place(self, numbers: Sequence[int] | None = None) -> list[int]:
        """An order of these pages (None: all) in which the most patches that are stored hold."""
        chosen = [self._pages[self._at(one)] for one in (numbers or [page.number for page in self._pages])]
        if len(chosen) <= ORDERS:
            best = max(itertools.permutations(chosen), key=self._patches)
            return [page.number for page in best]
        order: list[Page] = []
        while chosen:
            following = max(chosen, key=lambda page: self._patches((*order, page)))
            order.append(following)
            chosen.remove(following)
        return [page.number for page in order]

    def ask(self, question: str, **options: Any) -> Answer:
        """Answer a question about everything in the window. Options as for `Looseleaf.ask`.

        Pages without rows are computed where they stand, and their rows kept.
        """
        prompt, held, places = self._prompt(question)
        options.setdefault("policy", self.policy)
        answer = self.ll.ask(prompt, held=held, **options)
        for place, at in enumerate(places):
            page, rows = self._pages[at], held.rows.get(place)
            if rows is not None and rows is not page.kept and not page.clean:
                self._pages[at] = replace(page, kept=rows, lacking=False)
        self._fit_bytes()
        return answer

    def plan(self, question: str, **options: Any) -> Plan:
        """What a question would read and compute now."""
        prompt, held, _ = self._prompt(question)
        options.setdefault("policy", self.policy)
        return self.ll.plan(prompt, held=held, **options)

    def save(self, folder: str | Path) -> None:
        """Write pages, evicted ones and kept rows into a folder."""
        save_pages(
            Path(folder), self.ll,
            [SavedPage(page.number, page.segment, page.kept, page.clean, page.lacking) for page in self._pages],
            [SavedPage(page.number, page.segment) for page in self._evicted.values()],
            {"budget_tokens": self.budget_tokens, "budget_bytes": self.budget_bytes}, self.policy,
        )  # fmt: skip

    @classmethod
    def open(cls, ll: Looseleaf, folder: str | Path) -> Window:
        """A saved window; its rows too when the model, dtype and preamble are the ones they were computed by."""
        inside, outside, budgets, policy = open_pages(Path(folder), ll)
        window = cls(ll, policy=policy, **budgets)
        for one in inside:
            tokens = window._tokens(one.segment)
            window._pages.append(
                Page(number=one.number, segment=one.segment, tokens=tokens, kept=one.kept, clean=one.clean,
                     lacking=one.lacking)
            )  # fmt: skip
        for one in outside:
            page = Page(number=one.number, segment=one.segment, tokens=window._tokens(one.segment))
            window._evicted[one.number] = page
        window._numbers = itertools.count(1 + max((one.number for one in (*inside, *outside)), default=0))
        return window

    def _at(self, number: int) -> int:
        for at, page in enumerate(self._pages):
            if page.number == number:
                return at
        raise PromptError(f"there is no page {number} in the window; there are {[page.number for page in self._pages]}")

    def _tokens(self, segment: Segment) -> int:
        """Of a segment that fits; decodes it, so that what cannot be read fails here and not in a later question."""
        if isinstance(segment, str):
            tokens = len(self.ll.adapter.tokenizer(segment, add_special_tokens=False)["input_ids"])
        elif isinstance(segment, Image | Document | Clip):
            tokens = sum(map(len, self.ll.builder.build([segment, "."]).chunks))
        else:
            raise PromptError(f"a window takes text, Image, Document or Clip, got {type(segment).__name__}")
        if self.budget_tokens is not None and tokens > self.budget_tokens:
            raise LimitError(f"this page has {tokens:,} tokens, the window {self.budget_tokens:,}; raise budget_tokens")
        return tokens

    def _fit(self, *, keep: int) -> None:
        """Evict the oldest pages until the budget holds."""
        while self.budget_tokens is not None and self.tokens > self.budget_tokens:
            self.evict(next(page.number for page in self._pages if page.number != keep))

    def _fit_bytes(self) -> None:
        """Let go of the oldest kept rows until the budget holds; they are patched or computed again when asked for."""
        for at, page in enumerate(self._pages):
            if self.budget_bytes is None or self.nbytes <= self.budget_bytes:
                return
            self._pages[at] = replace(page, kept=None)

    def _prompt(self, question: str) -> tuple[list[Segment], Held, list[int]]:
        """The window as a prompt, the rows that serve there, and which page each of its chunks is."""
        if not isinstance(question, str) or not question.strip():
            raise PromptError(f"a window is asked a question in words, got {question!r}")
        prompt: list[Segment] = [*(page.segment for page in self._pages), question]
        places = [at for at, page in enumerate(self._pages) if page.is_chunk]
        built = self.ll.builder.build(prompt)
        before, held = antecedents(built), Held()
        for place, (at, span) in enumerate(zip(places, built.chunks, strict=True)):
            page, kept = self._pages[at], self._pages[at].kept
            assert span.chunk is not None
            if kept is None or kept.content != span.chunk.content:
                continue
            if page.lacking or self._serves(kept.antecedent, before[span.start]):
                held.rows[place] = kept
        held.clean = frozenset(place for place, at in enumerate(places) if self._pages[at].clean)
        return prompt, held, places

    def _serves(self, made: Antecedent, now: Antecedent) -> bool:
        """Whether rows computed behind one antecedent may stand behind another: by what the calibration allows."""
        calibration = self.ll.calibration
        ordered = calibration is not None and "order" in calibration.close.split("+")
        if Counter(now.chunks) - Counter(made.chunks):
            return False  # something new stands in front
        left = list(made.chunks)
        for gone in (Counter(made.chunks) - Counter(now.chunks)).elements():
            left.remove(gone)
        return ordered or tuple(left) == now.chunks

    def _patches(self, pages: Sequence[Page]) -> int:
        """How many of these pages, in this order, have a patch in the store."""
        policy = self.ll.request(["."], policy=self.policy).policy
        built: Prompt = self.ll.builder.build([*(page.segment for page in pages), "."])
        known = self.ll.linker.lookup(built, policy).chunks
        return sum(one.patch != "" for one in known)


def bytes_of(windows: Sequence[Window]) -> int:
    """Bytes of the rows some windows keep, those they share counted once."""
    rows = {id(page.kept.rows): page.kept.rows for one in windows for page in one.pages if page.kept is not None}
    return sum(one.nbytes for one in rows.values())
