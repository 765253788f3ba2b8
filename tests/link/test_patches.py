"""Patches in a running system: harvested once, found by their antecedent, put on without a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage

from looseleaf import FullReuse, Image, Looseleaf, Patched, PolicyError, Reprefill
from looseleaf.bench import exact
from looseleaf.kv.records import ChunkKV, Patch, Record
from looseleaf.link.harvest import Harvest
from looseleaf.link.linker import Keep
from looseleaf.link.reference import error
from looseleaf.model.tiny import FAMILIES
from looseleaf.store.protocol import Key

Open = Callable[..., Looseleaf]

WHOLE = Patched(share=1.0)


def noise(seed: int, height: int, width: int) -> PILImage.Image:
    return PILImage.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def prompt_of(ll: Looseleaf, seed: int = 41) -> list[Any]:
    return exact.make_prompts(ll, seed=seed, count=1)[0]


def teach(ll: Looseleaf, prompt: list[Any], policy: Patched = WHOLE) -> None:
    """Ask once, so that the patches of every chunk are there."""
    ll.ask(prompt, policy=policy, max_tokens=1)
    ll.settle()


@pytest.mark.parametrize("family", FAMILIES)
def test_relocated_and_patched_in_full_is_re_prefill(family: str, opened: Open) -> None:
    ll = opened(family)
    prompt = prompt_of(ll)
    built = ll.builder.build(prompt)
    expected = ll.reference.ours(built, Reprefill())
    teach(ll, prompt)
    plan = ll.plan(prompt, policy=WHOLE)
    assert plan.count().patched > 0
    assert plan.count().fresh == sum(len(span) for span in built.spans if span.chunk is None)
    assert error(ll.reference.ours(built, WHOLE), expected) < 1e-4
    assert error(ll.reference.ours(built, FullReuse()), expected) > 1e-4


def test_the_second_request_computes_words_only(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    built = ll.builder.build(prompt)
    words = sum(len(span) for span in built.spans if span.chunk is None)
    first = ll.ask(prompt, policy=WHOLE, max_tokens=4)
    assert not first.usage.approximate
    ll.settle()
    computed, seen = ll.linker.counters.chunks_computed, ll.linker.counters.vision_calls
    again = ll.ask(prompt, policy=WHOLE, max_tokens=4)
    assert again.token_ids == first.token_ids
    assert again.usage.approximate
    assert again.usage.fresh_tokens == words
    assert again.usage.patched_tokens + again.usage.exact_tokens == len(built) - words
    assert (ll.linker.counters.chunks_computed, ll.linker.counters.vision_calls) == (computed, seen)
    assert "patched" in str(again.plan)
    assert "patched" in str(again.usage)


def test_harvesting_costs_one_forward_of_each_chunk(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    teach(ll, prompt)
    chunks = ll.builder.build(prompt).chunks
    assert ll.linker.counters.chunks_computed == len(chunks)
    assert ll.engine.harvest.counters.patches == len(chunks)
    teach(ll, prompt)
    assert ll.engine.harvest.counters.patches == len(chunks)


def test_a_patch_takes_its_share_of_the_bytes(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    teach(ll, prompt_of(ll), Patched(share=0.25))
    counters = ll.engine.harvest.counters
    assert 0.1 * counters.page_bytes < counters.patch_bytes <= 0.25 * counters.page_bytes


def test_another_antecedent_has_no_patch(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    one, two = (Image(noise(seed, 56, 84)) for seed in (1, 2))
    teach(ll, ["See", one, "and", two, "what?"])
    assert ll.plan(["See", one, "and", two, "something else?"], policy=WHOLE).count().patched > 0
    for other in (["See", two, "and", one, "what?"], ["Look", one, "and", two, "what?"], ["See", two, "what?"]):
        assert ll.plan(other, policy=WHOLE).count().patched == 0
    assert ll.plan(["See", one, "and", two, "what?"], policy=Patched(share=0.5)).count().patched == 0


def test_a_close_patch_is_one_of_the_same_chunks_in_other_words_or_order(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    one, two, three, other = (Image(noise(seed, 56, 84)) for seed in (1, 2, 3, 4))
    teach(ll, ["See", one, "and", two, "and", three, "what?"])
    close = Patched(share=1.0, close=True)
    size = len(ll.builder.build(["See", one]).chunks[0])
    reworded = ["Look", one, two, three, "well?"]
    assert ll.plan(reworded, policy=WHOLE).count().patched == 0
    assert ll.plan(reworded, policy=close).count().patched == 3 * size
    assert "patched (close: words)" in str(ll.plan(reworded, policy=close))
    assert ll.plan(["See", one, "and", two, "and", three, "so?"], policy=close).pieces[1].patched == "exact"
    exchanged = ll.plan(
        ["See", two, "and", one, "and", three, "what?"], policy=Patched(share=1.0, close=True, rebuild=False)
    )
    assert [piece.patched for piece in exchanged.pieces if piece.what == "image"] == ["", "", "order"]
    for front in ([other, two], [one, two, other], [two]):
        assert ll.plan(["See", *front, three, "what?"], policy=close).count().patched == 0
    usage = ll.ask(reworded, policy=close, max_tokens=2).usage
    assert usage.patched_tokens == 3 * size
    assert usage.approximate


def test_a_close_patch_comes_near_and_one_of_its_own_nearer(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    one, two = (Image(noise(seed, 56, 84)) for seed in (1, 2))
    teach(ll, ["See", one, "and", two, "what?"])
    built = ll.builder.build(["See", one, "or", two, "what?"])
    expected = ll.reference.ours(built, Reprefill())
    close = error(ll.reference.ours(built, Patched(share=1.0, close=True)), expected)
    assert 1e-5 < close < error(ll.reference.ours(built, FullReuse()), expected)


def test_a_pointer_to_a_patch_that_is_gone_points_nowhere(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    one, two = (Image(noise(seed, 56, 84)) for seed in (1, 2))
    teach(ll, ["See", one, "and", two, "what?"])
    for key in [key for key in ll.store._held if key.part == "patch"]:  # type: ignore[attr-defined]
        ll.store.delete(key)
    assert ll.plan(["Look", one, two, "well?"], policy=Patched(share=1.0, close=True)).count().patched == 0


def test_a_prompt_moved_as_a_whole_finds_its_patches(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    teach(ll, prompt)
    moved = ll.request(prompt, policy=WHOLE, start_pos=500)
    assert ll.engine.plan(moved).count().patched > 0
    expected = ll.reference.ours(moved.prompt, Reprefill())
    assert error(ll.reference.ours(moved.prompt, WHOLE), expected) < 1e-4


def test_without_rebuilding_a_chunk_is_relocated(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    ll.warm([one for one in prompt if isinstance(one, Image)])
    plan = ll.plan(prompt, policy=Patched(rebuild=False))
    assert plan.count() == ll.plan(prompt, policy=FullReuse()).count()


def test_one_chunk_without_a_patch_has_all_computed_and_harvested(opened: Open) -> None:
    """Behind patched chunks it could never get a patch of its own."""
    ll = opened("qwen2_5_vl")
    one, two, three = (Image(noise(seed, 56, 84)) for seed in (1, 2, 3))
    teach(ll, ["See", one, "and", two, "what?"])
    longer = ["See", one, "and", two, "and", three, "what?"]
    assert ll.plan(longer, policy=WHOLE).count().patched == 0
    assert ll.plan(longer, policy=Patched(share=1.0, rebuild=False)).count().patched > 0
    assert not ll.ask(longer, policy=WHOLE, max_tokens=1).usage.approximate
    ll.settle()
    assert ll.engine.harvest.counters.patches == 3
    assert ll.plan(longer, policy=WHOLE).count().patched == 3 * len(ll.builder.build(["See", one]).chunks[0])


def test_a_chain_of_ten_does_not_compound(opened: Open) -> None:
    """Ten images, asked about as they arrive: every patch is the one a first look at that prompt would leave."""
    ll = opened("qwen2_5_vl")
    policy = Patched(share=0.34)
    images = [Image(noise(seed, 56, 56)) for seed in range(10)]
    for count in range(1, 11):
        teach(ll, [*images[:count], "what?"], policy)
    fresh = opened("qwen2_5_vl")
    teach(fresh, [*images, "what?"], policy)
    keys = [key for key in ll.store._held if key.part == "patch"]  # type: ignore[attr-defined]
    assert len(keys) == ll.engine.harvest.counters.patches == 9  # the first image stands at home
    for got, expected in ((ll.store.get(key), fresh.store.get(key)) for key in keys):
        assert isinstance(got, Patch)
        assert isinstance(expected, Patch)
        for mine, theirs in zip(got.keys[1:], expected.keys[1:], strict=True):
            assert mine is not None
            assert theirs is not None
            torch.testing.assert_close(mine.left @ mine.right.mT, theirs.left @ theirs.right.mT, atol=1e-4, rtol=1e-3)
    whole = ll.builder.build([*images, "what?"])
    ceiling = ll.reference.ours(whole, Reprefill())
    assert error(ll.reference.ours(whole, policy), ceiling) < error(ll.reference.ours(whole, FullReuse()), ceiling)


def test_what_stands_behind_a_patched_chunk_is_not_harvested(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that is gone when it is fetched: its chunk is computed behind patched ones, and leaves nothing behind."""
    ll = opened("qwen2_5_vl")
    prompt = ["See", *(Image(noise(seed, 56, 84)) for seed in (1, 2)), "what?"]
    teach(ll, prompt)
    keys = [key for key in ll.store._held if key.part == "patch"]  # type: ignore[attr-defined]
    last, real = keys[-1], ll.store.get

    def vanish(key: Key) -> Record | None:
        return None if key == last and ll.store.delete(key) else real(key)

    monkeypatch.setattr(ll.store, "get", vanish)
    assert ll.ask(prompt, policy=WHOLE, max_tokens=1).usage.approximate
    assert not ll.store.contains(last)
    ll.settle()
    assert ll.engine.harvest.counters.patches == 2
    assert ll.linker.counters.fallbacks == 1


def test_a_patch_that_is_gone_costs_time_only(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    teach(ll, prompt)
    expected = ll.reference.ours(ll.builder.build(prompt), Reprefill())
    real = ll.store.get
    monkeypatch.setattr(ll.store, "get", lambda key: None if key.part == "patch" else real(key))
    assert error(ll.reference.ours(ll.builder.build(prompt), WHOLE), expected) < 1e-5
    assert ll.linker.counters.fallbacks > 0


@pytest.mark.parametrize("option", ["no_store", "no_harvest"])
def test_a_request_may_leave_no_patch_behind(opened: Open, option: str) -> None:
    ll = opened("qwen2_5_vl")
    ll.ask(prompt_of(ll), policy=WHOLE, max_tokens=1, **{option: True})
    ll.settle()
    assert ll.engine.harvest.counters.patches == 0


def test_equal_requests_wait_for_one_patch_and_too_large_ones_are_let_go(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    requests = [ll.request(prompt, policy=WHOLE, max_tokens=1) for _ in range(3)]
    jobs = [ll.engine.submit(one) for one in requests]
    while not all(job.done.is_set() for job in jobs):
        ll.engine.step()
    assert ll.engine.harvest.waiting == 2
    small = Harvest(ll.linker, most_bytes=1000)
    linked = ll.linker.link(
        requests[0].prompt, ll.engine.plan(requests[0]), capacity=len(requests[0].prompt), keep=Keep()
    )
    small.note(linked, Keep())
    assert (small.waiting, small.counters.dropped) == (0, 2)
    linked.release()
    ll.engine.close()
    assert ll.engine.harvest.waiting == 0


def test_a_patch_of_no_layer_is_refused(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    with pytest.raises(PolicyError, match="from_layer must be below"):
        ll.ask(prompt_of(ll), policy=Patched(from_layer=99), max_tokens=1)
    teach(ll, prompt_of(ll), Patched(share=1))
    assert ll.plan(prompt_of(ll), policy=WHOLE).count().patched > 0


def test_a_store_that_fails_costs_patches_and_nothing_else(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    put = ll.store.put

    def refuse(key: Key, record: Record, *, ttl_s: float | None = None) -> bool:
        if key.part == "patch":
            raise OSError("the disk is gone")
        return put(key, record, ttl_s=ttl_s)

    monkeypatch.setattr(ll.store, "put", refuse)
    first = ll.ask(prompt, policy=WHOLE, max_tokens=2)
    ll.settle()
    assert ll.engine.harvest.counters.failed == len(ll.builder.build(prompt).chunks)
    assert "the disk is gone" in caplog.text
    assert ll.ask(prompt, policy=WHOLE, max_tokens=2).token_ids == first.token_ids


def test_a_store_without_room_for_a_page_gets_no_patch(opened: Open) -> None:
    ll = opened("qwen2_5_vl", store_bytes=1000)
    ll.ask(prompt_of(ll), policy=WHOLE, max_tokens=1)
    ll.settle()
    assert ll.engine.harvest.counters.patches == 0
    assert ll.engine.idle


def test_chunk_records_stay_as_they_are(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    prompt = prompt_of(ll)
    ll.warm([one for one in prompt if isinstance(one, Image)])
    chunks = [span.chunk for span in ll.builder.build(prompt).chunks if span.chunk]
    before = [ll.store.get(ll.linker.keys.kv(chunk)) for chunk in chunks]
    copies = [[plane.clone() for plane in one.rows.keys] for one in before if isinstance(one, ChunkKV)]
    teach(ll, prompt)
    ll.ask(prompt, policy=WHOLE, max_tokens=2)
    for record, copy in zip(before, copies, strict=True):
        assert isinstance(record, ChunkKV)
        assert all(torch.equal(plane, kept) for plane, kept in zip(record.rows.keys, copy, strict=True))
