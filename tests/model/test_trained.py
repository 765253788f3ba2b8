"""Every trained model that comes with the package, asked through the engine: it binds images, and reuse is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from looseleaf import Looseleaf
from looseleaf.bench.cases import Try, bounds_of, items, make_cases, try_all
from looseleaf.bench.reuse import patches_of
from looseleaf.model.embedded import embedded_models
from looseleaf.training.prompts import HARMLESS

SEED = 77
COUNT = 6


@pytest.fixture(scope="module", params=embedded_models())
def ll(request: pytest.FixtureRequest) -> Iterator[Looseleaf]:
    with Looseleaf.open(f"embedded:{request.param}", dtype="float32") as opened:
        yield opened


def test_blind_reuse_loses_what_binds_images_and_a_patch_restores_it(ll: Looseleaf) -> None:
    def right(hops: int) -> tuple[int, int, int]:
        found = make_cases(ll, items(bounds_of(ll), "change", hops, COUNT, SEED))
        arms = try_all(ll, found, [{"blind": Try(), "patched": Try(patches=patches_of(case)[0.25])} for case in found])
        ceiling = sum(case.right for case in found)
        return ceiling, sum(one["blind"].right for one in arms), sum(one["patched"].right for one in arms)

    assert right(1) == (COUNT, COUNT, COUNT)
    ceiling, blind, patched = right(2)
    assert ceiling >= COUNT - 1
    assert blind <= COUNT / 2
    assert patched >= ceiling - 1


@pytest.mark.parametrize("question", ["What is the capital of France?", "Write a poem about the sea.", "Who are you?"])
def test_other_questions_are_turned_down(ll: Looseleaf, question: str) -> None:
    assert ll.ask([question], max_tokens=24).text == HARMLESS
