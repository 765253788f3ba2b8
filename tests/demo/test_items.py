"""What the demo asks: albums are held out and repeatable, and moving changes places, never the question."""

from __future__ import annotations

import itertools

import pytest

from looseleaf.demo.items import TIMED, Item, draw_albums
from looseleaf.prompt.segments import Document, Image, Message, PromptLike, Segment
from looseleaf.workloads.albums import HEADLINE
from looseleaf.workloads.bounds import HELD_OUT

BOUNDS = HELD_OUT["qwen2_5_vl"]


def first(task: str, seed: int = 0) -> tuple[Item, ...]:
    return next(draw_albums(task, BOUNDS, seed))


def chunks(prompt: PromptLike) -> list[Segment]:
    parts = [part for one in prompt for part in (one.content if isinstance(one, Message) else (one,))]
    return [part for part in parts if isinstance(part, Image | Document)]


@pytest.mark.parametrize("task", HEADLINE)
def test_every_album_has_single_hop_and_multi_hop_questions(task: str) -> None:
    for items in itertools.islice(draw_albums(task, BOUNDS, 3), 4):
        assert {item.question.hops for item in items} == {1, 2}
        assert len(items[0].images) in BOUNDS.counts_of(task)


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    told = [[item.question for item in first("change", seed)] for seed in (5, 5, 6)]
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("task", HEADLINE)
def test_moving_keeps_every_image_and_the_question(task: str) -> None:
    for item in first(task):
        where = item.moved()
        assert {"other words", "a later turn"} <= set(where)
        assert ("another order" in where) == (task not in TIMED)
        for prompt in where.values():
            assert sorted(map(id, chunks(prompt))) == sorted(map(id, item.images))
            last = prompt[-1]
            assert (last.content[-1] if isinstance(last, Message) else last) == item.question.text


@pytest.mark.parametrize("task", sorted(set(HEADLINE) - set(TIMED)))
def test_another_order_starts_with_another_image_and_keeps_what_is_needed_in_order(task: str) -> None:
    for item in first(task):
        order = [item.images.index(one) for one in chunks(item.moved()["another order"])]
        assert order[0] != 0
        needed = [at for at in order if at in item.question.needs]
        assert needed == sorted(needed)
