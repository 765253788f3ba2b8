"""Training prompts: an album, words around its pictures, and as many questions behind it as fit, each a branch.

Every branch sees the album and itself, never another branch, and starts at the same position: a prompt asks forty
questions for the price of one look (DESIGN §10: dense supervision is what made it learn). What sees what is a small
table over segments, so that eviction, pictures that do not see each other and sliding windows are entries in it.
What this file does not know: tensors, models, how pictures are painted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from looseleaf.workloads.albums import Album, Entry
from looseleaf.workloads.lookups import SEARCH_TOOL
from looseleaf.workloads.pictures import Picture
from looseleaf.workloads.questions import Fact, Question, Split

IGNORED = -100

Turn = tuple[str, str | Sequence[Fact], int]
"""A question, its answer or the facts of a form, and the number of its kind."""

FORM_ENTRIES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A family's way to write a conversation, taken from its chat template, and to count an image's tokens."""

    openings: tuple[str, ...]
    """What may stand before the user's first words: the usual one first, then with other system messages."""
    tool_opening: str
    """The same with the search tool on offer."""
    reply: str
    """From the end of a question to the start of the answer."""
    end: str
    """What ends an answer."""
    next_turn: str
    """From there to the next question."""
    tool_turn: str
    """From the end of a search call to what was found."""
    tool_reply: str
    """From what was found to the answer."""
    image_open: str
    image_close: str
    image_tail: str
    """What the template writes behind an image: words, not part of it."""
    pad_id: int
    axes: int
    grid: Callable[[int, int], tuple[int, int]]
    """Rows and columns of tokens of an image by height and width."""


FILLER_WORDS = (
    "the", "a", "and", "of", "to", "in", "is", "it", "was", "for", "on", "are", "as", "with", "they", "at", "be",
    "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "all", "were", "we", "when", "your",
    "can", "said", "there", "use", "an", "each", "which", "she", "do", "how", "their", "if", "will", "up",
    "other", "about", "out", "many", "then", "them", "these", "so", "some", "her", "would", "make", "like", "him",
    "into", "time", "has", "look", "two", "more", "write", "go", "see", "number", "no", "way", "could", "people",
    "my", "than", "first", "water", "been", "call", "who", "now", "find", "long", "down", "day", "did", "get",
    "come", "made", "may", "part", "over", "new", "sound", "take", "only", "little", "work", "know", "place",
    "year", "live", "me", "back", "give", "most", "very", "after", "thing", "our", "just", "name", "good",
    "sentence", "man", "think", "say", "great", "where", "help",
)  # fmt: skip
"""Words that say nothing, around pictures."""


def filler(chance: Random, count: int) -> str:
    """So many of them; one in five is made up, so that pieces of words no question has are met as well."""
    made_up = ("".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(2, 8))) for _ in range(count))
    return " ".join(one if chance.random() < 0.2 else chance.choice(FILLER_WORDS) for one in made_up)


SYSTEMS = ("You are a helpful assistant.", "Answer briefly.", "You look at pictures and answer questions about them.")


def read_format(tokenizer: Any, *, image: tuple[str, str], pad_id: int, axes: int, grid: Any) -> Format:
    """Render the tokenizer's chat template around marks and cut it there."""
    mark, other = "\x01", "\x02"

    def render(messages: list[dict[str, Any]], **more: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))

    def said(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}]}

    usual, reply = render([said("user", mark)]).split(mark)
    openings = [usual] + [render([said("system", text), said("user", mark)]).split(mark)[0] for text in SYSTEMS]
    turns = render([said("user", "q"), said("assistant", mark), said("user", other)])
    between = turns.split(mark)[1].split(other)[0]
    end = tokenizer.eos_token
    if not between.startswith(end):
        raise ValueError(f"the chat template ends answers with {between!r}, the tokenizer with {end!r}")
    shown = {
        "role": "user",
        "content": [{"type": "text", "text": mark}, {"type": "image"}, {"type": "text", "text": other}],
    }
    tail = render([shown]).split(other)[0].split(tokenizer.decode([pad_id]))[-1].removeprefix(image[1])
    tool = render([said("user", "q"), said("assistant", mark), said("tool", other)], tools=[SEARCH_TOOL])
    after_call, after_found = tool.split(mark)[1].split(other)
    return Format(
        openings=tuple(openings),
        tool_opening=render([said("user", mark)], tools=[SEARCH_TOOL]).split(mark)[0],
        reply=reply,
        end=end,
        next_turn=between.removeprefix(end),
        tool_turn=after_call.removeprefix(end),
        tool_reply=after_found,
        image_open=image[0],
        image_close=image[1],
        image_tail=tail,
        pad_id=pad_id,
        axes=axes,
        grid=grid,
    )


class Words:
    """Text to ids, word by word from memory: the tokenizer never merges across a space, so the ids are the same."""

    _PIECES = re.compile(r" [^ ]+|[^ ]+| ")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """The ids of plain words; not to be changed."""
        known = self._known.get(text)
        if known is not None:
            return known
        found = [one for piece in self._PIECES.findall(text) for one in self._piece(piece)]
        if len(text) < 16:  # keys, values and fillers, which come again and again
            self._known[text] = found
        return found

    def _piece(self, piece: str) -> list[int]:
        known = self._known.get(piece)
        if known is None:
            known = self._known[piece] = self.whole(piece)
        return known

    def whole(self, text: str) -> list[int]:
        """The ids of a template's text, markers included."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@dataclass(slots=True)
class Draft:
    """One prompt being written: tokens with their segment, position and target, and who may see whom."""

    axes: int
    ids: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Where each token stands; an image's tokens where it begins, if they have rows and columns beside."""
    grids: list[tuple[int, int, int]] = field(default_factory=list)
    """First token, rows and columns of each such image."""
    pictures: list[Picture] = field(default_factory=list)
    sees: list[set[int]] = field(default_factory=list)
    """Segments each segment sees, itself included."""
    at: int = 0
    """The next position."""
    tail: str = ""
    """What the next words must start with."""

    def extend(self, other: Draft) -> None:
        """Put another prompt behind: neither sees the other, and its positions are its own."""
        first, start = len(self.sees), len(self.ids)
        self.ids += other.ids
        self.segments += [first + one for one in other.segments]
        self.targets += other.targets
        self.kinds += other.kinds
        self.steps += other.steps
        self.grids += [(start + at, rows, columns) for at, rows, columns in other.grids]
        self.pictures += other.pictures
        self.sees += [{first + one for one in seen} for seen in other.sees]

    def segment(self, sees: set[int]) -> int:
        number = len(self.sees)
        self.sees.append(sees | {number})
        return number

    def text(self, ids: Sequence[int], segment: int, *, target: bool = False, kind: int = -1) -> None:
        """Words; as a target each is predicted by the token before it."""
        if target:
            self.targets[-1], self.kinds[-1] = ids[0], kind
            self.targets += [*ids[1:], IGNORED]
            self.kinds += [*[kind] * (len(ids) - 1), -1]
        else:
            self.targets += [IGNORED] * len(ids)
            self.kinds += [-1] * len(ids)
        self.ids += ids
        self.segments += [segment] * len(ids)
        self.steps += range(self.at, self.at + len(ids))
        self.at += len(ids)

    def positions(self) -> NDArray[np.int64]:
        """Of every token [axes, token]."""
        found = np.tile(np.array(self.steps, dtype=np.int64), (self.axes, 1))
        for first, rows, columns in self.grids:
            found[1:, first : first + rows * columns] += np.indices((rows, columns)).reshape(2, -1)
        return found

    def image(self, picture: Picture, segment: int, form: Format, opening: list[int], closing: list[int]) -> None:
        """An image with its markers; M-RoPE counts rows and columns and goes on behind the longer side."""
        rows, columns = form.grid(picture.height, picture.width)
        self.text(opening, segment)
        count = rows * columns
        self.ids += [form.pad_id] * count
        self.segments += [segment] * count
        self.targets += [IGNORED] * count
        self.kinds += [-1] * count
        if self.axes == 3:
            self.grids.append((len(self.ids) - count, rows, columns))
            self.steps += [self.at] * count
            self.at += max(rows, columns)
        else:
            self.steps += range(self.at, self.at + count)
            self.at += count
        self.text(closing, segment)
        self.tail = form.image_tail
        self.pictures.append(picture)


FILLERS = (
    "", "", "", "", " and ", " then ", "\n", " Here is one more. ", " Now look at this: ", " The next one: ",
    " Please read it well. ", " This is from today. ", " I found this too. ", " Keep it in mind. ",
)  # fmt: skip
OPENERS = ("", "", "", "Look at these. ", "Please look: ", "Hello! I have some pictures. ", "Read this first. ")
BETWEEN = ("", "", " ", "\n", "\nNow tell me: ", " A question: ")

HARMLESS = "I can only answer questions about the pictures."
_OTHER_STARTS = (
    "Who", "What is", "Why does", "How do I", "Tell me about", "Write", "Can you", "Please explain", "Where is",
    "When did", "Translate", "Do you like", "Sing", "Give me", "Is there", "What do you think of", "Summarize",
)  # fmt: skip
_OTHER_WORDS = (
    "the weather", "a poem", "Paris", "your name", "love", "the news", "a joke", "music", "the president", "cats",
    "a recipe for bread", "quantum physics", "my homework", "the moon", "football", "a story", "time", "money",
    "python", "the war", "God", "this code", "tomorrow", "hello", "the meaning of life", "my friend", "dinner",
    "the stock market", "an email to my boss", "dinosaurs", "how cars work", "school", "the internet",
    "my dog", "history", "a secret",
)  # fmt: skip


def other_question(chance: Random) -> str:
    """A question that has nothing to do with pictures."""
    words = f"{chance.choice(_OTHER_STARTS)} {chance.choice(_OTHER_WORDS)}"
    if chance.random() < 0.4:
        words += f" and {chance.choice(_OTHER_WORDS)}"
    return words + chance.choice("?.! ").strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """Who sees whom in one prompt."""

    blind: bool = False
    """Pictures see the opening and themselves only: what reuse without repair gives."""
    window: int | None = None
    """Pictures see this many pictures before them."""
    evicted: frozenset[int] = frozenset()
    """Entries no question sees, though later pictures did."""


class Writer:
    """Writes albums and questions into drafts in one family's format."""

    def __init__(self, tokenizer: Any, form: Format) -> None:
        self.form, self.words = form, Words(tokenizer)
        whole = self.words.whole
        self._opening, self._closing = whole(form.image_open), whole(form.image_close)
        # A space that ends an opening belongs to the word behind it.
        self._lead = " " if form.openings[0].endswith(" ") else ""
        self.canonical = self._begin(tokenizer, form.openings[0])
        self.openings = [self._begin(tokenizer, text.removesuffix(" ")) for text in form.openings]
        self.tool_opening = self._begin(tokenizer, form.tool_opening.removesuffix(" "))
        self.reply, self.end, self.next_turn = (
            whole(form.reply),
            whole(form.end),
            whole(form.next_turn.removesuffix(" ")),
        )
        self.tool_turn, self.tool_reply = whole(form.tool_turn), whole(form.tool_reply)

    @staticmethod
    def _begin(tokenizer: Any, text: str) -> list[int]:
        """The ids a whole prompt would start with, a token that begins every prompt included."""
        return list(tokenizer(text)["input_ids"])

    def lay_out(
        self, entries: Sequence[Entry], sight: Sight, gaps: Sequence[str], *,
        opening: Sequence[int] | None = None, jumps: Sequence[int] = (),
    ) -> tuple[Draft, set[int]]:  # fmt: skip
        """Entries with `gaps[i]` before entry i; returns the draft and the segments a question sees."""
        draft = Draft(axes=self.form.axes)
        first = draft.segment(set())
        draft.text(self.openings[0] if opening is None else opening, first)
        seen, shown = {first}, [first]
        pictures: list[int] = []
        for number, entry in enumerate(entries):
            draft.at += jumps[number] if jumps else 0
            words = (draft.tail if number else self._lead) + gaps[number]
            draft.tail = ""
            if isinstance(entry, str):
                words = words.rstrip(" ")
            if words:
                gap = draft.segment(set(seen))
                draft.text(self.words.ids(words), gap)
                seen.add(gap)
                shown.append(gap)
            sees = set(seen)
            if sight.blind:
                sees = {self._canonical(draft)}
            elif sight.window is not None:
                sees -= set(pictures[: max(0, len(pictures) - sight.window)])
            place = draft.segment(sees)
            self.add(draft, entry, place)
            pictures.append(place)
            seen.add(place)
            if number not in sight.evicted:
                shown.append(place)
        return draft, set(shown)

    def _canonical(self, draft: Draft) -> int:
        """The usual opening once more, right before what comes next, as it stood when that was computed alone."""
        copy = draft.segment(set())
        draft.at -= len(self.canonical)
        draft.text(self.canonical, copy)
        return copy

    def add(self, draft: Draft, entry: Entry, segment: int) -> None:
        """A picture or a page of words."""
        if isinstance(entry, str):
            draft.text(self.words.ids("\n" + entry), segment)
        else:
            draft.image(entry, segment, self.form, self._opening, self._closing)

    def branch(self, turns: Sequence[Turn]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Questions and answers of one branch as ids, and the spans (start, stop, kind) of what must be predicted.

        Of a form that is its values alone: keys come in an order nobody could know.
        """
        ids: list[int] = []
        spans: list[tuple[int, int, int]] = []
        for number, (question, answer, kind) in enumerate(turns):
            ids += self.next_turn + self.words.ids(self._lead + question) if number else self.words.ids(question)
            ids += self.reply
            if isinstance(answer, str):
                start = len(ids)
                ids += self.words.ids(answer) + self.end
                spans.append((start, len(ids), kind))
                continue
            for place, fact in enumerate(answer):
                ids += self.words.ids(f", {fact.key}" if place else fact.key)
                start = len(ids)
                ids += self.words.ids(f" {fact.value}")
                spans.append((start, len(ids), kind))
            ids += self.end
        return ids, spans

    def found(self, answer: str, kind: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        """What stands behind the pages a search found, and the span of the answer in it."""
        ids = self.tool_reply + self.words.ids(answer) + self.end
        return ids, [(len(self.tool_reply), len(ids), kind)]

    def ask(self, draft: Draft, seen: set[int], ids: list[int], spans: list[tuple[int, int, int]]) -> None:
        """Append one branch at the draft's current position, which stays where it is."""
        start = draft.at
        segment = draft.segment(set(seen))
        done = 0
        for first, last, kind in spans:
            draft.text(ids[done:first], segment)
            draft.text(ids[first:last], segment, target=True, kind=kind)
            done = last
        draft.text(ids[done:], segment)
        draft.at = start


def pick_question(album: Album, chance: Random, split: Split, sight: Sight, *, plain: float) -> Question | None:
    """A question that can be answered under `sight`, by the worlds' weights; plain ones count `plain` times."""
    kinds = album.kinds()
    weights = [weight * (1 if kind.startswith("form_") else plain) for _, kind, weight in kinds]
    number, kind, _ = chance.choices(kinds, weights)[0]
    question = album.ask(number, kind, chance, split)
    if sight.blind and question.hops > 1:
        return None
    if question.facts:
        seen = question.facts
        if sight.evicted:
            seen = tuple(fact for fact in seen if not sight.evicted.intersection(fact.carriers))
        if len(seen) == len(question.facts) <= FORM_ENTRIES:
            return question
        return replace(question, facts=seen[:FORM_ENTRIES]) if seen else None
    return None if sight.evicted.intersection(question.carriers) else question
