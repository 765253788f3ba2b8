"""What the embedded models' vocabularies are trained on: the workloads' own English and some plain sentences."""

from __future__ import annotations

from functools import cache

from looseleaf.model.tiny.vocabulary import CORPUS
from looseleaf.training.prompts import BETWEEN, FILLER_WORDS, FILLERS, HARMLESS, OPENERS, SYSTEMS, other_question
from looseleaf.workloads.albums import Album, mixed_album
from looseleaf.workloads.clips import Clip
from looseleaf.workloads.documents import NAMES, Documents
from looseleaf.workloads.lookups import SEARCH_TOOL, look_up
from looseleaf.workloads.questions import trained
from looseleaf.workloads.streams import Stream


@cache
def corpus() -> tuple[str, ...]:
    """Some thousand lines, always the same."""
    split = trained()
    chance = split.chance("corpus")
    size = (224, 224)
    lines = [*CORPUS, *FILLERS, *OPENERS, *BETWEEN, HARMLESS, *SYSTEMS, str(SEARCH_TOOL).replace("'", '"')]
    lines += [f" {name}" for name in NAMES] * 4
    lines += [f" {word}" for word in FILLER_WORDS] * 4
    lines += ["assistant", "user", "system", "picture", "image"] * 20
    for _ in range(60):
        clip = Clip(chance, split, 112, frames=5)
        stream = Stream(chance, split, 112, frames=12, needles=4)
        for album in (mixed_album(chance, split, size, 6), Album(chance, [clip]), Album(chance, [stream])):
            for number, kind, _weight in album.kinds():
                question = album.ask(number, kind, chance, split)
                lines += [question.text, question.answer, f" {question.text}"]
        pages = Documents(chance, split, size)
        lines += [*pages.texts(), look_up(pages, chance, split)[1], other_question(chance)]
    return tuple(lines)
