"""The linker: what is stored is not computed again, what is gone is, and nothing approximate is stored as exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from looseleaf import DeepLayers, FirstK, FullReuse, Image, Looseleaf, PrefixCache, Reprefill
from looseleaf.bench import exact
from looseleaf.kv.records import ChunkKV, Frame, SequenceKV
from looseleaf.link.reference import error
from looseleaf.store.protocol import Key

Open = Callable[..., Looseleaf]


@pytest.fixture
def ll(opened: Open) -> Looseleaf:
    return opened("qwen3_vl")


@pytest.fixture
def prompt(ll: Looseleaf) -> list[Any]:
    return exact.make_prompts(ll, seed=31, count=1)[0]


def images(prompt: list[Any]) -> list[Image]:
    return [one for one in prompt if isinstance(one, Image)]


def test_the_vision_tower_sees_an_image_once(ll: Looseleaf, prompt: list[Any]) -> None:
    for policy in (Reprefill(), FullReuse(), FirstK(k=4), DeepLayers(from_layer=1)):
        ll.ask(prompt, policy=policy, max_tokens=1)
    assert ll.linker.counters.vision_calls == 2


def test_the_same_image_twice_in_a_prompt_is_one_chunk(ll: Looseleaf, prompt: list[Any]) -> None:
    image = images(prompt)[0]
    twice = ["Look", image, "and again", image, "well?"]
    assert exact.mask_oracle_error(ll, twice) <= exact.TOLERANCE
    assert ll.linker.counters.chunks_computed == 1


def test_warming_computes_ahead_what_asking_then_finds(ll: Looseleaf, prompt: list[Any]) -> None:
    assert ll.warm(images(prompt)) == 2
    assert ll.warm(images(prompt)) == 0
    usage = ll.ask(prompt, policy=FullReuse(), max_tokens=1).usage
    assert usage.relocated_tokens == sum(len(span) for span in ll.builder.build(prompt).chunks)
    assert ll.linker.counters.chunks_computed == 2


def test_warming_can_keep_states_for_deep_layers(ll: Looseleaf, prompt: list[Any]) -> None:
    ll.warm(images(prompt), layers=[2])
    ll.ask(prompt, policy=DeepLayers(from_layer=2), max_tokens=1)
    assert ll.linker.counters.chunks_computed == 2


@pytest.mark.parametrize("policy", [PrefixCache(), FullReuse(), FirstK(k=4), DeepLayers(from_layer=1)])
def test_a_store_without_room_costs_time_not_answers(opened: Open, prompt: list[Any], policy: Any) -> None:
    empty, roomy = opened("qwen3_vl", store_bytes=0), opened("qwen3_vl")
    for _ in range(2):
        assert (
            empty.ask(prompt, policy=policy, max_tokens=4).token_ids
            == roomy.ask(prompt, policy=policy, max_tokens=4).token_ids
        )
    assert empty.stats().records == 0


@pytest.mark.parametrize("part", ["kv", "features", "sequence"])
def test_a_part_that_vanishes_between_plan_and_fetch_is_computed_again(
    ll: Looseleaf, prompt: list[Any], part: str
) -> None:
    policy = PrefixCache() if part == "sequence" else FirstK(k=4)
    given = ll.reference.stock(prompt)
    ll.ask(prompt, policy=policy, max_tokens=1)
    ll.step()
    expected = ll.reference.ours(given.prompt, policy)
    request = ll.request(prompt, policy=policy)
    plan = ll.engine.plan(request)
    gone = [key for key in ll.store._held if key.part == part]
    assert gone
    for key in gone[len(gone) // 2 :]:
        ll.store.delete(key)
    with torch.inference_mode():
        linked = ll.linker.link(request.prompt, plan, capacity=len(request.prompt), keep=request.keep)
        while not linked.ready:
            (hidden,) = ll.adapter.decoder.run([linked.take(10**6)])
        logits = ll.adapter.decoder.logits(hidden[-1:])[0]
    assert error(logits, expected) <= exact.TOLERANCE
    assert ll.linker.counters.fallbacks >= (part != "features")


def test_no_store_leaves_nothing_behind(ll: Looseleaf, prompt: list[Any]) -> None:
    for policy in (PrefixCache(), FullReuse(), DeepLayers(from_layer=1)):
        ll.ask(prompt, policy=policy, max_tokens=2, no_store=True)
    assert ll.stats().records == 0


def test_ttl_lets_records_go(ll: Looseleaf, prompt: list[Any]) -> None:
    now = [0.0]
    ll.store._clock = lambda: now[0]
    ll.ask(prompt, policy=FullReuse(), max_tokens=1, ttl_s=10)
    assert ll.plan(prompt, policy=FullReuse()).count().relocated > 0
    now[0] = 11.0
    assert ll.plan(prompt, policy=FullReuse()).count().relocated == 0


def test_only_exact_rows_become_a_prefix(ll: Looseleaf, prompt: list[Any]) -> None:
    request = ll.request(prompt, policy=FullReuse(), max_tokens=8)
    plan = ll.engine.plan(request)
    with torch.inference_mode():
        linked = ll.linker.link(request.prompt, plan, capacity=len(request.prompt) + 8, keep=request.keep)
        ll.adapter.decoder.run([linked.take(10**6)])
        ll.linker.harvest(linked, (), request.keep)
    stored = [key for key in ll.store._held if key.part == "sequence"]
    assert linked.table.exact_tokens == request.prompt.chunks[0].start
    assert len(stored) * 32 <= linked.table.exact_tokens


def test_a_conversation_goes_on_from_its_stored_prefix(ll: Looseleaf, prompt: list[Any]) -> None:
    first = ll.ask(prompt, max_tokens=40, ignore_eos=True)
    turns = [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And then?"},
    ]
    second = ll.ask(turns, max_tokens=4)
    assert second.usage.exact_tokens >= len(ll.builder.build(prompt)) // 32 * 32 - 32
    assert not second.usage.approximate
    fresh = ll.ask(turns, max_tokens=4, policy=Reprefill())
    assert second.token_ids == fresh.token_ids


def test_a_prefix_that_differs_in_an_image_alone_is_not_reused(ll: Looseleaf, prompt: list[Any]) -> None:
    image, other = images(prompt)
    ll.ask([image, "What is it?"], max_tokens=1)
    ll.step()
    same = ll.plan([image, "What is it?"]).prefix_tokens
    assert ll.plan([other, "What is it?"]).prefix_tokens < same


def test_a_chunk_behind_the_canonical_context_is_exact_where_it_stands(ll: Looseleaf, prompt: list[Any]) -> None:
    image = images(prompt)[0]
    home = [image, "What is it?"]
    ll.warm([image])
    answer = ll.ask(home, policy=FullReuse(), max_tokens=2)
    assert not answer.usage.approximate
    assert answer.usage.exact_tokens == len(ll.builder.build(home).chunks[0])
    given = ll.reference.stock(home)
    assert error(ll.reference.ours(given.prompt, FullReuse()), ll.reference.logits(given)[-1]) <= exact.TOLERANCE


def test_every_record_names_its_frame(ll: Looseleaf, prompt: list[Any]) -> None:
    ll.ask(prompt, policy=FullReuse(), max_tokens=1)
    ll.ask(prompt, policy=PrefixCache(), max_tokens=1)
    ll.step()  # an answer is out before its rows are stored; wait until they are
    frames = {type(held.record): held.record.frame for held in ll.store._held.values() if hasattr(held.record, "frame")}
    assert frames == {ChunkKV: Frame.UNROTATED, SequenceKV: Frame.PLACED}


def test_keys_differ_by_model_context_and_content(opened: Open, prompt: list[Any]) -> None:
    chunk = opened("qwen3_vl").builder.build(prompt).chunks[0].chunk
    other = opened("qwen3_vl").builder.build(prompt).chunks[1].chunk
    assert chunk is not None
    assert other is not None
    keys: set[Key] = {
        opened("qwen3_vl").linker.keys.kv(chunk),
        opened("qwen3_vl").linker.keys.kv(other),
        opened("qwen3_vl", canonical="none").linker.keys.kv(chunk),
        opened("qwen3_vl", "bfloat16").linker.keys.kv(chunk),
        opened("qwen3_vl_moe").linker.keys.kv(chunk),
        opened("qwen3_vl").linker.keys.states(chunk, 1),
        opened("qwen3_vl").linker.keys.states(chunk, 2),
        opened("qwen3_vl").linker.keys.features(chunk),
    }
    assert len(keys) == 8
