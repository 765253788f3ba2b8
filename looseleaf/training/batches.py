"""Batches: drafts of one kind padded to one length, made by worker processes while the GPU trains.

In every batch the openings, the words between pictures, their number, order and positions, fonts and wordings are
random (DESIGN §10, what the first attempt got wrong). Half of the prompts hide pictures that others were read behind
from the questions; in a quarter pictures do not see each other and only single-hop questions are asked, so that those
do not come to lean on what reuse takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from looseleaf.training.course import Course, Level, pick_kind, pick_size
from looseleaf.training.drills import DRILLS, drill_world
from looseleaf.training.prompts import (
    BETWEEN,
    FILLERS,
    HARMLESS,
    IGNORED,
    OPENERS,
    Draft,
    Sight,
    Turn,
    Writer,
    filler,
    other_question,
    pick_question,
)  # fmt: skip
from looseleaf.workloads.albums import Album, mixed_album
from looseleaf.workloads.bounds import Bounds
from looseleaf.workloads.clips import Clip
from looseleaf.workloads.documents import Documents
from looseleaf.workloads.lookups import look_up
from looseleaf.workloads.notes import some_word
from looseleaf.workloads.pictures import Colour
from looseleaf.workloads.questions import Size
from looseleaf.workloads.streams import Stream

KINDS = (
    "other", "colour", "shape", "tag", "colour_of", "where", "legend", "legend_cell", "code", "no_code",
    "form_cells", "form_things", "form_tags", "form_codes", "form_legend", "form_key",
    "changed_cell", "changed_to", "form_changes", "line", "id_of", "value_of_id", "value_of", "no_name",
    "form_lines", "form_ids", "form_values", "form_matches", "frame_colour", "frame_shape", "form_frames", "happened",
    "when", "form_events", "form_when", "first_event", "sign", "sign_chain", "form_signs", "form_chains",
    "search", "found", "note", "form_note", "echo",
)  # fmt: skip
SEGMENTS = 160
"""Room in the table of who sees whom."""
LEAST = 120
"""Tokens of questions behind an album, at least."""
LEAST_OF_NOTE = 32
"""The same behind a note, of which many are read rather than one often."""
LEAST_OF_LINES = 112
"""Pixels of height from which on a note has several lines: a model that takes only large pictures would see too few."""
LEAST_OF_SHORT = 80
"""Room worth trying to fill with a short prompt; for all others it is twice LEAST."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diet:
    """What one model is fed: shares of the kinds of batch, and how much at once."""

    bounds: Bounds
    length: int
    """Tokens of a prompt, questions included."""
    batch: int
    questions: float = 1.6
    """Tokens of questions for each token of what they ask about."""
    pictures: float = 0.75
    clips: float = 0.25
    streams: float = 0.0
    lookups: float = 0.0

    @property
    def mixed(self) -> dict[str, float]:
        """Shares of the kinds of batch that ask about everything."""
        return {"pictures": self.pictures, "clips": self.clips, "streams": self.streams, "lookups": self.lookups}


def make_row(kind: str, writer: Writer, diet: Diet, level: Level, size: Size, chance: Random) -> Draft:
    """Prompts of one kind, one behind the other, until a row of the batch is full; none sees another."""
    row = Draft(axes=writer.form.axes)
    misses = 0
    makers = {"lookups": _lookup_draft, "search": _lookup_draft, "found": _found_draft, "words": _words_draft}
    make = makers.get(kind, _album_draft)
    while misses < 2:
        room, segments = diet.length - len(row.ids), SEGMENTS - len(row.sees)
        if room < (LEAST_OF_SHORT if kind == "line" else 2 * LEAST):
            break
        draft = make(kind, writer, diet, level, size, chance, room)
        if draft is None or len(draft.sees) > segments:
            misses += 1
        else:
            row.extend(draft)
    return row


def _album_draft(
    kind: str, writer: Writer, diet: Diet, level: Level, size: Size, chance: Random, room: int
) -> Draft | None:
    """An album and about as many tokens of questions as it has itself; None where there is no room for it."""
    rows, columns = writer.form.grid(*size)
    album = _album(kind, diet.bounds, level, size, chance, max(1, (room - LEAST) // (rows * columns + 6)))
    sight = _drill_sight(kind, album, chance) if kind in DRILLS else _sight(kind, album, chance)
    gaps, jumps = _gaps(len(album.entries), chance, short=kind == "streams", wide=level.wide)
    opening = writer.openings[0] if chance.random() < 0.6 else chance.choice(writer.openings)
    draft, seen = writer.lay_out(album.entries, sight, gaps, opening=opening, jumps=jumps)
    draft.at += chance.randrange(60) if chance.random() < 0.2 else 0
    share, least = (0.3, LEAST_OF_NOTE) if kind == "line" else (diet.questions, LEAST)
    return _fill(draft, seen, writer, album, level, sight, room, share, chance, least=least)


def _album(kind: str, bounds: Bounds, level: Level, size: Size, chance: Random, most: int) -> Album:
    """Pictures for one kind of batch, at most `most` where their number may vary."""
    split = level.split

    def some(counts: Sequence[int], limit: int) -> int:
        return chance.choice([one for one in counts if one <= min(most, limit)] or counts[:1])

    match kind:
        case "pictures":
            return mixed_album(chance, split, size, some(bounds.counts, level.pictures), as_text=level.as_text)
        case "clips":
            frames = some(bounds.clip_frames, level.frames)
            return Album(chance, [Clip(chance, split, size[0], frames=frames)])
        case "streams":
            frames = some(bounds.stream_frames, 2 * level.frames)
            needles = chance.randint(2, max(2, frames // 3))
            return Album(chance, [Stream(chance, split, size[0], frames=frames, needles=needles)])
        case _:
            if kind == "line" and size[0] < LEAST_OF_LINES:
                split = replace(split, most_lines=1)
            return Album(chance, [drill_world(kind, chance, split, size)])


def _words_draft(
    kind: str, writer: Writer, diet: Diet, level: Level, size: Size, chance: Random, room: int
) -> Draft | None:
    """Without pictures: words to say again, or two pages as words. Both are found by what stands before them."""
    if chance.random() < 0.5:
        pages = Documents(chance, level.split, (224, 224))
        album, sight = Album(chance, [pages], as_text=[pages]), Sight()
        draft, seen = writer.lay_out(album.entries, sight, _gaps(2, chance, wide=level.wide)[0])
        return _fill(draft, seen, writer, album, level, sight, room, diet.questions, chance)
    words = " ".join(some_word(chance) for _ in range(chance.randint(4, 24)))
    draft, seen = writer.lay_out([], Sight(), [])
    writer.ask(draft, seen, *writer.branch([(f"Repeat: {words}", words, KINDS.index("echo"))]))
    return draft if len(draft.ids) <= room else None


def _sight(kind: str, album: Album, chance: Random) -> Sight:
    what = chance.random()
    if what < 0.25:
        return Sight(blind=True)
    window = chance.randint(1, 8) if kind == "streams" and chance.random() < 0.6 else None
    if what < 0.75:
        return Sight(evicted=frozenset(at for at in album.absorbed() if chance.random() < 0.6), window=window)
    return Sight(window=window)


def _drill_sight(skill: str, album: Album, chance: Random) -> Sight:
    hidden = DRILLS[skill].binds and chance.random() < 0.5
    return Sight(evicted=frozenset(album.absorbed() if hidden else ()))


def _gaps(count: int, chance: Random, *, short: bool = False, wide: bool) -> tuple[list[str], list[int]]:
    """Words before each of `count` entries, and positions to skip there."""
    gaps = [chance.choice(OPENERS), *(chance.choice(FILLERS[:7] if short else FILLERS) for _ in range(count - 1))]
    if short and chance.random() < 0.6:
        gaps = [gaps[0]] + [""] * (count - 1)
    if wide and chance.random() < 0.3:
        gaps[0] = filler(chance, chance.randint(5, 90)) + ". "
    if wide and chance.random() < 0.3:
        most = 4 if short else 16
        for at in range(1, count):
            gaps[at] = f" {filler(chance, chance.randint(1, most))} "
    jumping = wide and chance.random() < 0.5
    jumps = [chance.randrange(320) if jumping and chance.random() < 0.6 else 0 for _ in range(count)]
    return gaps, jumps


def _turn(album: Album, level: Level, sight: Sight, chance: Random) -> Turn | None:
    if chance.random() < 0.025 * level.plain:
        return other_question(chance), HARMLESS, 0
    question = pick_question(album, chance, level.split, sight, plain=level.plain)
    if question is None:
        return None
    return question.text, question.facts or question.answer, KINDS.index(question.kind)


def _fill(
    draft: Draft, seen: set[int], writer: Writer, album: Album, level: Level, sight: Sight, room: int, share: float,
    chance: Random, *, lead: tuple[list[int], list[tuple[int, int, int]]] | None = None, least: int = LEAST,
) -> Draft | None:  # fmt: skip
    """Branches until they are `share` times as long as what they ask about; `lead` stands at the head of each.

    None where there is no room for them.
    """
    misses, length = 0, len(draft.ids) + max(least, int(share * len(draft.ids)))
    if room - length < len(draft.ids) + least:  # nothing else would fit behind it
        length = room
        if room - len(draft.ids) < least:
            return None
    while misses < 80 and len(draft.sees) < SEGMENTS:
        turns = [
            turn for _ in range(2 if chance.random() < 0.15 else 1) if (turn := _turn(album, level, sight, chance))
        ]
        if not turns:
            misses += 1
            continue
        first = turns[0]
        turns[0] = (draft.tail + chance.choice(BETWEEN) + first[0], *first[1:]) if lead is None else first
        ids, spans = writer.branch(turns)
        if lead is not None:
            head = lead[0] + writer.next_turn
            ids, spans = head + ids, [*lead[1], *((a + len(head), b + len(head), k) for a, b, k in spans)]
        if len(draft.ids) + len(ids) > length:
            misses += 16
            continue
        writer.ask(draft, seen, ids, spans)
    return draft


def _lookup_draft(
    kind: str, writer: Writer, diet: Diet, level: Level, size: Size, chance: Random, room: int
) -> Draft | None:
    """With the search tool on offer: calls for what is not there, answers for what is, answers once it was found."""
    split = level.split
    count = chance.choice([count for count in diet.bounds.counts if count <= min(level.pictures - 1, 4)])
    album = mixed_album(chance, split, size, count)
    known = {name for world in album.worlds if isinstance(world, Documents) for name in world.id_of}
    library = Documents(chance, split, size)
    while known.intersection(library.id_of):
        library = Documents(chance, split, size)
    gaps, jumps = _gaps(len(album.entries), chance, wide=level.wide)
    sight = Sight()
    draft, seen = writer.lay_out(album.entries, sight, gaps, opening=writer.tool_opening, jumps=jumps)
    if kind == "search" or chance.random() < 0.35:
        for _ in range(5):
            question, call = look_up(library, chance, split)
            text = draft.tail + chance.choice(BETWEEN) + question.text
            writer.ask(draft, seen, *writer.branch([(text, call, KINDS.index("search"))]))
        if kind == "search":
            return draft if len(draft.ids) <= room else None
        return _fill(draft, seen, writer, album, level, sight, room, diet.questions, chance)
    question, call = look_up(library, chance, split)
    flow = draft.segment(set(seen))
    asked = draft.tail + chance.choice(BETWEEN) + question.text
    draft.text(writer.branch([(asked, call, 0)])[0] + writer.tool_turn, flow)
    seen = seen | {flow}
    for page in library.pictures:
        place = draft.segment(set(seen))
        writer.add(draft, page, place)
        seen.add(place)
    lead = writer.found(question.answer, KINDS.index("found"))
    return _fill(draft, seen, writer, Album(chance, [library]), level, sight, room, 0.3, chance, lead=lead)


def _found_draft(
    kind: str, writer: Writer, diet: Diet, level: Level, size: Size, chance: Random, room: int
) -> Draft | None:
    """Several searches, each in a conversation of its own that ends where the same found pages begin."""
    library = Documents(chance, level.split, size)
    draft, seen = writer.lay_out([], Sight(), [], opening=writer.tool_opening)
    asked = [look_up(library, chance, level.split) for _ in range(6)]
    talks = [writer.branch([(question.text, call, 0)])[0] + writer.tool_turn for question, call in asked]
    pages_at = draft.at + max(map(len, talks))
    flows: list[int] = []
    for talk in talks:
        draft.at = pages_at - len(talk)
        flows.append(draft.segment(set(seen)))
        draft.text(talk, flows[-1])
    for page in library.pictures:
        place = draft.segment(set(seen))
        writer.add(draft, page, place)
        seen.add(place)
    for (question, _), flow in zip(asked, flows, strict=True):
        writer.ask(draft, seen | {flow}, *writer.found(question.answer, KINDS.index("found")))
    return draft if len(draft.ids) <= room else None


@dataclass(slots=True)
class Batch:
    """Drafts of one kind as tensors."""

    kind: str
    ids: Tensor
    """[b, t]"""
    segments: Tensor
    """[b, t]"""
    positions: Tensor
    """[axes, b, t]"""
    targets: Tensor
    """[b, t]: the next token where it is an answer's, else IGNORED."""
    kinds: Tensor
    """[b, t]: what was asked, where there is a target."""
    sees: Tensor
    """[b, segment, segment], bool"""
    where: Tensor
    """[target]: where in the flattened batch the targets are."""
    shapes: Tensor
    """[mark, 8]: the picture's number, then as in Picture, of the marks of one sheet."""
    letters: Tensor
    """The same of the other."""
    grounds: Tensor
    """[picture, 3]"""
    size: Size

    def to(self, device: str) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """What the loader calls before handing the batch over."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        changed: dict[str, Any] = {
            name: change(value) if isinstance(value, Tensor) else value for name, value in values.items()
        }
        return Batch(**changed)


def collate(kind: str, drafts: Sequence[Draft], length: int, axes: int) -> Batch:
    """Pad to `length`; padding is a segment of its own that sees itself."""
    count = len(drafts)
    ids, segments = np.zeros((count, length), np.int64), np.zeros((count, length), np.int64)
    targets, kinds = np.full((count, length), IGNORED, np.int64), np.full((count, length), -1, np.int64)
    positions = np.zeros((axes, count, length), np.int64)
    sees = np.zeros((count, SEGMENTS + 1, SEGMENTS + 1), bool)
    marks: list[Any] = []
    grounds: list[Colour] = []
    for row, draft in enumerate(drafts):
        used = len(draft.ids)
        ids[row, :used], segments[row, :used] = draft.ids, draft.segments
        targets[row, :used], kinds[row, :used] = draft.targets, draft.kinds
        positions[:, row, :used] = draft.positions()
        segments[row, used:] = SEGMENTS
        sees[row, SEGMENTS, SEGMENTS] = True
        for segment, seen in enumerate(draft.sees):
            sees[row, segment, list(seen)] = True
        for picture in draft.pictures:
            numbered = np.full((len(picture.marks), 8), len(grounds), np.int32)
            numbered[:, 1:] = picture.marks
            marks.append(numbered)
            grounds.append(picture.ground)
    every = np.concatenate(marks) if marks else np.zeros((0, 8), np.int32)
    first = next((draft.pictures[0] for draft in drafts if draft.pictures), None)
    return Batch(
        kind=kind,
        ids=torch.from_numpy(ids),
        segments=torch.from_numpy(segments),
        positions=torch.from_numpy(positions),
        targets=torch.from_numpy(targets),
        kinds=torch.from_numpy(kinds),
        sees=torch.from_numpy(sees),
        where=torch.from_numpy(np.flatnonzero(targets.ravel() != IGNORED)),
        shapes=torch.from_numpy(every[every[:, 1] == 0]),
        letters=torch.from_numpy(every[every[:, 1] == 1]),
        grounds=torch.tensor(np.array(grounds, dtype=np.float32).reshape(-1, 3)),
        size=(0, 0) if first is None else (first.height, first.width),
    )


class Batches(IterableDataset[Batch]):
    """Endless batches; each worker draws from seeds of its own."""

    def __init__(self, writer: Writer, diet: Diet, course: Course, seed: int) -> None:
        self._writer, self._diet, self._course, self._seed = writer, diet, course, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        number, step = (worker.id if worker else 0), 0
        if worker:
            torch.set_num_threads(1)
        diet = self._diet
        while True:
            chance = self._course.level.split.chance(self._seed, number, step)
            kind = pick_kind(self._course.shares, chance)
            level = self._course.level_of(kind)
            size = pick_size(kind, level, diet.bounds, chance)
            rows = [make_row(kind, self._writer, diet, level, size, chance) for _ in range(diet.batch)]
            yield collate(kind, rows, diet.length, self._writer.form.axes)
            step += 1


def load_batches(writer: Writer, diet: Diet, course: Course, *, seed: int, workers: int) -> Any:
    """An iterator over batches made by `workers` processes for where the course stands."""
    return iter(
        DataLoader(
            Batches(writer, diet, course, seed), batch_size=None, num_workers=workers,
            prefetch_factor=4 if workers else None, pin_memory=torch.cuda.is_available(),
        )
    )  # fmt: skip
