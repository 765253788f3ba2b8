"""Auto: the best there is for each chunk, and what it does where there is nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImage

from looseleaf import Auto, Image, Looseleaf, PolicyError, Reprefill
from looseleaf.link.linker import Keep
from looseleaf.link.plan import plan_link
from looseleaf.link.policies import DRIFTS, parse_policy, policy_name
from looseleaf.link.reference import error

Open = Callable[..., Looseleaf]

EVERY = "+".join(DRIFTS)


@pytest.fixture
def ll(opened: Open) -> Looseleaf:
    return opened("qwen2_5_vl")


@pytest.fixture
def images() -> list[Image]:
    draw = np.random.default_rng(5)
    return [Image(PILImage.fromarray(draw.integers(0, 256, (56, 84, 3), np.uint8))) for _ in range(5)]


def teach(ll: Looseleaf, prompt: list[Any], policy: Auto) -> None:
    ll.ask(prompt, policy=policy, max_tokens=1)
    ll.settle()


def patched(ll: Looseleaf, prompt: list[Any], policy: Auto) -> list[str]:
    """Whose patch each image gets; what happens to it instead where it gets none."""
    return [
        piece.patched or ("exact" if piece.use == "exact" else piece.use)
        for piece in ll.plan(prompt, policy=policy).pieces
        if piece.what == "image"
    ]


def test_balanced_computes_once_and_patches_from_then_on(ll: Looseleaf, images: list[Image]) -> None:
    policy = Auto(share=1.0)
    prompt = ["See", *images[:3], "what?"]
    first = ll.ask(prompt, policy=policy, max_tokens=3)
    assert not first.usage.approximate
    ll.settle()
    assert patched(ll, prompt, policy) == ["exact"] * 3  # the prefix itself is stored, and exact
    later = ll.request(prompt, policy=policy, start_pos=1000).prompt  # no prefix there, the same antecedents
    plan = ll.linker.plan(later, policy)
    assert plan.prefix_tokens == 0
    assert [piece.patched for piece in plan.pieces if piece.what == "image"] == ["exact"] * 3
    assert error(ll.reference.ours(later, policy), ll.reference.ours(later, Reprefill())) < 1e-4


def test_what_stands_behind_an_equal_prefix_is_patched_or_computed(ll: Looseleaf, images: list[Image]) -> None:
    policy = Auto(share=1.0, close="words")
    one, two, three, _, _ = images
    teach(ll, [one, "and", two, "and", three, "what?"], policy)
    plan = ll.plan([one, "and", two, "then", three, "what?"], policy=policy)
    assert 0 < plan.prefix_tokens <= plan.pieces[-2].start
    count = plan.count()
    assert count.exact + count.relocated + count.patched + count.recomputed + count.fresh == plan.tokens
    assert plan.pieces[-2].patched == "words"
    assert plan.exact_tokens == next(piece.start for piece in plan.pieces if piece.patched)
    assert patched(ll, [one, "and", two, "then", three, "what?"], Auto(share=1.0))[-1] == "compute"


def test_an_image_in_which_a_prefix_ends_is_finished_exactly(ll: Looseleaf) -> None:
    draw = np.random.default_rng(6)
    one, two = (Image(PILImage.fromarray(draw.integers(0, 256, (140, 168, 3), np.uint8))) for _ in range(2))
    prompt = [one, "and", two, "what?"]
    ll.ask(prompt, policy=Auto(share=1.0), max_tokens=1)
    ll.settle()
    built = ll.builder.build([one, "and", two, "else?"])
    start, stop = built.chunks[1].start, built.chunks[1].stop
    lookup = replace(ll.linker.lookup(built, Auto(share=1.0)), prefix_tokens=(start + stop) // 2)
    plan = plan_link(
        built, lookup, Auto(share=1.0), layers=len(ll.adapter.layout.layers), canonical=ll.builder.canonical
    )  # fmt: skip
    assert not plan.approximate
    assert plan.rows[0].slots == (range((start + stop) // 2, len(built)),)
    assert plan.count().exact + plan.count().fresh == len(built)


def test_a_lost_block_of_a_prefix_costs_computing_it(ll: Looseleaf, images: list[Image]) -> None:
    policy = Auto(share=1.0, close="words")
    teach(ll, [*images[:3], "and", images[3], "what?"], policy)
    prompt = ll.builder.build([*images[:3], "then", images[3], "what?"])
    plan = ll.linker.plan(prompt, policy)
    assert plan.prefix_tokens > 0
    assert plan.pieces[-2].patched == "words"
    expected = ll.reference.ours(prompt, policy)
    first = next(ll.linker.keys.blocks(prompt))
    linked_with = ll.linker.store.get
    gone = {first}
    ll.linker.store.get = lambda key: None if key in gone else linked_with(key)  # type: ignore[method-assign]
    try:
        fallbacks = ll.linker.counters.fallbacks
        with ll.engine.lock:
            linked = ll.linker.link(prompt, plan, capacity=len(prompt), keep=Keep())
        assert ll.linker.counters.fallbacks == fallbacks + 1
        assert linked.plan.prefix_tokens == 0
        assert linked.plan.pieces[-2].patched == "words"
        linked.release()
        assert error(ll.reference.ours(prompt, policy), expected) < 1e-4
    finally:
        ll.linker.store.get = linked_with  # type: ignore[method-assign]


def test_fast_answers_at_once_and_makes_the_patch_later(ll: Looseleaf, images: list[Image]) -> None:
    policy = Auto(mode="fast", share=1.0, k=2)
    ll.warm(images[:3])
    prompt = ["See", *images[:3], "what?"]
    first = ll.ask(prompt, policy=policy, max_tokens=1)
    assert first.usage.approximate
    assert first.usage.recomputed_tokens == 3 * 2
    ll.settle()
    assert ll.engine.harvest.counters.prompts == 1
    assert ll.engine.harvest.counters.patches == 3
    assert patched(ll, prompt, policy) == ["exact"] * 3
    built = ll.builder.build(prompt)
    assert error(ll.reference.ours(built, policy), ll.reference.ours(built, Reprefill())) < 1e-4
    ll.ask(prompt, policy=policy, max_tokens=1)
    ll.settle()
    assert ll.engine.harvest.counters.prompts == 1  # nothing was missing any more


def test_the_same_hurried_prompt_waits_once(ll: Looseleaf, images: list[Image]) -> None:
    policy = Auto(mode="fast", k=2)
    for reply in [ll.submit(["See", *images[:2], "what?"], policy=policy, max_tokens=1) for _ in range(3)]:
        reply.result()
    ll.settle()
    assert ll.engine.harvest.counters.prompts == 1


def test_what_waits_is_counted_off_as_it_was_counted_on(ll: Looseleaf, images: list[Image]) -> None:
    harvest = ll.engine.harvest
    ll.warm(images[:3])
    with ll.engine.lock:
        reply = ll.submit(["See", *images[:3], "what?"], policy=Auto(mode="fast", k=2), max_tokens=1)
        while not reply.job.done.is_set():
            ll.step()
        assert harvest.waiting
        for span in reply.job.request.prompt.chunks:
            assert span.chunk is not None
            assert dict(span.chunk.inputs)  # pixels that were not there when it was counted
    ll.settle()
    assert (harvest.waiting, harvest._held_bytes) == (0, 0)


def test_exact_is_exact_and_leaves_patches_behind(ll: Looseleaf, images: list[Image]) -> None:
    prompt = ["See", *images[:2], "what?"]
    teach(ll, prompt, Auto(share=1.0))
    moved = ["Look", *images[:2], "what?"]
    answer = ll.ask(moved, policy=Auto(mode="exact", share=1.0), max_tokens=1)
    assert not answer.usage.approximate
    ll.settle()
    assert patched(ll, moved, Auto(share=1.0)) != ["compute", "compute"]


@pytest.mark.parametrize(
    ("drift", "front"),
    [("words", (0, 1)), ("order", (1, 0)), ("fewer", (1,)), ("again", (0, 1, 1))],
)  # fmt: skip
def test_a_drift_is_followed_when_it_is_allowed(
    ll: Looseleaf, images: list[Image], drift: str, front: tuple[int, ...]
) -> None:
    teach(ll, ["See", images[0], images[1], images[2], "what?"], Auto(share=1.0))
    prompt = ["Look", *(images[at] for at in front), images[2], "what?"]
    fast = Auto(mode="fast", share=1.0, close=drift, k=2)
    assert patched(ll, prompt, fast)[-1] == drift
    others = "+".join(one for one in DRIFTS if one != drift)
    if drift != "words":  # a stricter one that also fits is preferred
        assert patched(ll, prompt, Auto(mode="fast", share=1.0, close=others, k=2))[-1] != drift
    assert patched(ll, prompt, Auto(mode="fast", share=1.0, k=2))[-1] == "reuse"


def test_new_or_replaced_images_in_front_make_patches_stale(ll: Looseleaf, images: list[Image]) -> None:
    teach(ll, ["See", images[0], images[1], images[2], "what?"], Auto(share=1.0))
    for front in ((0, 1, 3), (0, 3), (3,)):
        prompt = ["See", *(images[at] for at in front), images[2], "what?"]
        assert patched(ll, prompt, Auto(share=1.0, close=EVERY))[-1] == "compute"


def test_names_and_mistakes() -> None:
    assert parse_policy("auto") == Auto()
    assert parse_policy("auto:fast") == Auto(mode="fast")
    assert parse_policy("auto:balanced,share=0.06,close=order+words") == Auto(share=0.06, close="order+words")
    assert Auto(close="order+words").drifts == ("words", "order")
    assert policy_name(Auto(mode="fast", k=8)) == "auto:mode=fast,k=8"
    for wrong in ("auto:slow", "auto:close=near", "auto:share=2", "auto:k=-1", "auto:from_layer=-1"):
        with pytest.raises(PolicyError, match="auto: "):
            parse_policy(wrong)
