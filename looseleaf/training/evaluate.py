"""How well a trained model answers held-out questions, with every picture seen and with pictures blind to each other.

Answers are read off one forward with the right answer in place: all of its tokens are the most likely ones exactly when
greedy decoding would say it. Pictures that do not see each other is what reuse without repair gives, as
`looseleaf bench exact` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from looseleaf.training.batches import KINDS, SEGMENTS, Diet, collate
from looseleaf.training.loop import Pass
from looseleaf.training.prompts import FILLERS, OPENERS, Draft, Sight, Writer
from looseleaf.workloads.albums import HEADLINE, Album, headline_question, task_album
from looseleaf.workloads.bounds import HELD_OUT
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.lookups import look_up
from looseleaf.workloads.questions import Question, Split, held_out, held_out_fonts

QUESTIONS = 4
"""Questions asked of one album."""

LONG = "Here is a note from the office about the next week that has nothing to do with it, please read on. "


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One way to lay the same kinds of album out."""

    name: str
    split: Split
    blind: bool = False
    evict: bool = False
    preamble: int = 0
    """Times LONG stands before the first picture."""
    gap: int = 0
    """Words between two pictures."""
    jump: int = 0
    """Positions skipped before each picture."""


def settings() -> list[Setting]:
    """What every figure is given for: plain and blind, then what must not matter."""
    usual, fonts = held_out(), held_out_fonts()
    return [
        Setting(name="reprefill", split=usual),
        Setting(name="blind", split=usual, blind=True),
        Setting(name="evicted", split=usual, evict=True),
        Setting(name="evicted, blind", split=usual, evict=True, blind=True),
        Setting(name="fonts", split=fonts),
        Setting(name="preamble", split=usual, preamble=3),
        Setting(name="gaps", split=usual, gap=12),
        Setting(name="positions", split=usual, jump=150),
    ]


Case = tuple[Setting, str, int]
"""A setting, a task and hops."""


def evaluate(
    family: str, forward: Pass, writer: Writer, diet: Diet, *, count: int = 512, workers: int = 0,
    tell: Callable[[str], None] = print,
) -> list[dict[str, Any]]:  # fmt: skip
    """Accuracy by setting, task and hops over at least `count` questions each, written by `workers` processes."""
    tasks = [task for task in HEADLINE if task != "stream" or diet.streams]
    cases: list[Case] = [
        (setting, task, hops)
        for setting in settings()
        for task in tasks
        for hops in (1, 2)
        if hops == 2 or not setting.evict
    ]
    if diet.lookups:
        cases += [(settings()[0], f"lookup {kind}", 1) for kind in ("search", "found", "plain")]
    asked = Cases(family, writer, diet, cases, count)
    rows: list[dict[str, Any]] = []
    told = ""
    for (setting, task, hops), drafts in zip(
        cases, DataLoader(asked, batch_size=None, num_workers=workers), strict=True
    ):
        right, total = _score_drafts(forward, diet, writer, drafts)
        rows.append({"setting": setting.name, "task": task, "hops": hops, "n": total, "right": right / max(1, total)})
        if setting.name != told:
            tell(f"-- {setting.name}")
            told = setting.name
        tell(f"{task:20s} {hops} {rows[-1]['right']:.3f}")
    return rows


class Cases(Dataset[list[Draft]]):
    """The drafts of every case."""

    def __init__(self, family: str, writer: Writer, diet: Diet, cases: Sequence[Case], count: int) -> None:
        self._family, self._writer, self._diet, self._cases, self._count = family, writer, diet, cases, count

    def __len__(self) -> int:
        return len(self._cases)

    def __getitem__(self, number: int) -> list[Draft]:
        setting, task, hops = self._cases[number]
        if task.startswith("lookup "):
            return list(_lookups(task.removeprefix("lookup "), self._writer, self._diet, self._family, self._count))
        return list(_drafts(self._family, self._writer, self._diet, setting, task, hops, self._count))


def _drafts(
    family: str, writer: Writer, diet: Diet, setting: Setting, task: str, hops: int, count: int
) -> Iterator[Draft]:
    bounds, made, written = HELD_OUT[family], 0, 0
    for number in range(4 * count):
        chance = setting.split.chance(task, hops, number)
        # one size a batch: the painter draws pictures of one size together
        size = (
            (bounds.frame_side,) * 2
            if task in ("clip", "stream")
            else bounds.sizes[written // diet.batch % len(bounds.sizes)]
        )
        album = task_album(task, chance, setting.split, size, chance.choice(bounds.counts_of(task)))
        questions = list(_questions(task, hops, album, chance, setting.split))
        if not questions:
            continue
        evicted = frozenset(questions[0].needs) - set(questions[0].carriers) if setting.evict else frozenset()
        if setting.evict:
            questions = questions[:1]
        draft, seen = _lay_out(writer, album, Sight(blind=setting.blind, evicted=evicted), setting, chance)
        for question in questions:
            ids, spans = writer.branch([(draft.tail + question.text, question.answer, KINDS.index(question.kind))])
            if len(draft.ids) + len(ids) <= diet.length:
                writer.ask(draft, seen, ids, spans)
                made += 1
        yield draft
        written += 1
        if made >= count:
            return


def _questions(task: str, hops: int, album: Album, chance: Random, split: Split) -> Iterator[Question]:
    for _ in range(QUESTIONS):
        question = headline_question(task, hops, album, chance, split)
        if question is not None:
            yield question


def _lay_out(writer: Writer, album: Album, sight: Sight, setting: Setting, chance: Random) -> tuple[Draft, set[int]]:
    words = LONG.split()
    gaps = [chance.choice(OPENERS) + LONG * setting.preamble]
    for _ in album.entries[1:]:
        gaps.append(
            " " + " ".join(chance.choices(words, k=setting.gap)) + " " if setting.gap else chance.choice(FILLERS)
        )
    jumps = [setting.jump] * len(album.entries)
    return writer.lay_out(album.entries, sight, gaps, jumps=jumps)


def _lookups(kind: str, writer: Writer, diet: Diet, family: str, count: int) -> Iterator[Draft]:
    split, bounds = held_out(), HELD_OUT[family]
    for number in range(count):
        chance = split.chance("lookup", kind, number)
        size = bounds.sizes[0]
        album = task_album("legend", chance, split, size, 3)
        library = Documents(chance, split, size)
        question, call = look_up(library, chance, split)
        gaps = [""] * len(album.entries)
        draft, seen = writer.lay_out(album.entries, Sight(), gaps, opening=writer.tool_opening)
        if kind == "plain":
            plain = headline_question("legend", 1 + number % 2, album, chance, split)
            assert plain is not None
            ids, spans = writer.branch([(plain.text, plain.answer, KINDS.index(plain.kind))])
        elif kind == "search":
            ids, spans = writer.branch([(question.text, call, KINDS.index("search"))])
        else:
            flow = draft.segment(set(seen))
            draft.text(writer.branch([(question.text, call, 0)])[0] + writer.tool_turn, flow)
            seen.add(flow)
            for page in library.pictures:
                place = draft.segment(set(seen))
                writer.add(draft, page, place)
                seen.add(place)
            ids, spans = writer.found(question.answer, KINDS.index("found"))
        writer.ask(draft, seen, ids, spans)
        yield draft


@torch.no_grad()
def _score_drafts(forward: Pass, diet: Diet, writer: Writer, drafts: Sequence[Draft]) -> tuple[int, int]:
    """Questions answered right, and all."""
    right = total = 0
    waiting: list[Draft] = []
    for draft in [*drafts, None]:
        if draft is not None:
            waiting.append(draft)
        if waiting and (draft is None or len(waiting) == diet.batch):
            asked = len(waiting)
            waiting += [waiting[0]] * (diet.batch - asked)
            good, number = _score_batch(forward, diet, writer, waiting, asked)
            right, total, waiting = right + good, total + number, []
    return right, total


def _score_batch(forward: Pass, diet: Diet, writer: Writer, drafts: list[Draft], asked: int) -> tuple[int, int]:
    batch = collate("evaluation", drafts, diet.length, writer.form.axes).to(forward.device)
    eager = torch.compiler.set_stance("force_eager")  # compiling again for a hundred passes would not pay
    with eager, torch.autocast(forward.device, torch.bfloat16):
        logits, targets = forward(batch)
    rows = batch.where // batch.ids.shape[1]
    branches = rows * SEGMENTS + batch.segments.flatten()[batch.where]
    wrong = (logits.argmax(-1) != targets).long()
    size = len(drafts) * SEGMENTS
    counts = torch.bincount(branches, minlength=size)[: asked * SEGMENTS]
    wrongs = torch.bincount(branches, weights=wrong.float(), minlength=size)[: asked * SEGMENTS]
    return int(((counts > 0) & (wrongs == 0)).sum()), int((counts > 0).sum())
