"""Looseleaf as a user holds it: ask, stream, await, cancel, close."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import looseleaf
from looseleaf import CancelledError, ClosedError, ConfigError, FirstK, Looseleaf
from looseleaf.bench import exact

Open = Callable[..., Looseleaf]


@pytest.fixture
def ll(opened: Open) -> Looseleaf:
    return opened("qwen2_5_vl")


@pytest.fixture
def prompt(ll: Looseleaf) -> list[Any]:
    return exact.make_prompts(ll, seed=41, count=1)[0]


def test_the_public_names_exist_and_are_sorted() -> None:
    assert list(looseleaf.__all__) == sorted(looseleaf.__all__)
    assert all(hasattr(looseleaf, name) for name in looseleaf.__all__)


def test_streamed_pieces_join_to_the_answer(ll: Looseleaf, prompt: list[Any]) -> None:
    whole = ll.ask(prompt, max_tokens=20, ignore_eos=True)
    assert "".join(ll.stream_ask(prompt, max_tokens=20, ignore_eos=True)) == whole.text


def test_closing_a_stream_cancels_its_request(ll: Looseleaf, prompt: list[Any]) -> None:
    pieces = ll.stream_ask(prompt, max_tokens=5000, ignore_eos=True)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert not ll.step()
    assert ll.engine.idle


def test_a_reply_can_be_cancelled_and_says_so(ll: Looseleaf, prompt: list[Any]) -> None:
    reply = ll.submit(prompt, max_tokens=5000, ignore_eos=True)
    assert ll.cancel(reply)
    with pytest.raises(CancelledError):
        reply.result()
    assert not reply.cancel()


def test_waiting_may_time_out_while_the_request_goes_on(ll: Looseleaf, prompt: list[Any]) -> None:
    reply = ll.submit(prompt, max_tokens=300, ignore_eos=True)
    with pytest.raises(TimeoutError):
        reply.result(timeout_s=0.0)
    assert len(reply.result().token_ids) == 300


def test_many_threads_ask_at_once(ll: Looseleaf) -> None:
    prompts = exact.make_prompts(ll, seed=42, count=6)
    expected = [ll.ask(prompt, max_tokens=6, ignore_eos=True).token_ids for prompt in prompts]
    got: dict[int, tuple[int, ...]] = {}

    def work(number: int) -> None:
        got[number] = ll.ask(prompts[number], max_tokens=6, ignore_eos=True, policy="reprefill").token_ids

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[number] for number in range(6)] == expected


def test_replies_are_awaited_and_iterated_in_asyncio(ll: Looseleaf) -> None:
    prompts = exact.make_prompts(ll, seed=43, count=3)
    expected = [ll.ask(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]

    async def both() -> tuple[list[Any], str]:
        replies = [ll.submit(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
        answers = await asyncio.gather(*replies)
        text = "".join([piece async for piece in ll.submit(prompts[0], max_tokens=8, ignore_eos=True)])
        return list(answers), text

    answers, text = asyncio.run(both())
    assert [one.token_ids for one in answers] == [one.token_ids for one in expected]
    assert text == expected[0].text


def test_leaving_an_async_stream_cancels_its_request(ll: Looseleaf, prompt: list[Any]) -> None:
    async def leave() -> None:
        pieces = aiter(ll.submit(prompt, max_tokens=5000, ignore_eos=True))
        async for _ in pieces:
            break
        await pieces.aclose()  # type: ignore[attr-defined]

    asyncio.run(leave())
    assert not ll.step()
    assert ll.engine.idle


def test_a_cancelled_task_cancels_its_request(ll: Looseleaf, prompt: list[Any]) -> None:
    async def abandon() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ll.submit(prompt, max_tokens=5000, ignore_eos=True)._wait(), 0.05)

    asyncio.run(abandon())
    assert not ll.step()
    assert ll.engine.idle


def test_an_error_reaches_whoever_waits_and_the_engine_goes_on(
    ll: Looseleaf, prompt: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("the disk is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(ll.linker, "link", broken)
        with pytest.raises(RuntimeError, match="on fire"):
            ll.ask(prompt)
        with pytest.raises(RuntimeError, match="on fire"):
            list(ll.stream_ask(prompt))
    assert ll.ask(prompt, max_tokens=1).token_ids


def test_a_closed_looseleaf_refuses_politely(opened: Open, prompt: list[Any]) -> None:
    with opened("qwen2_5_vl") as ll:
        running = ll.submit(prompt, max_tokens=5000, ignore_eos=True)
    with pytest.raises(ClosedError):
        running.result()
    with pytest.raises(ClosedError):
        ll.ask(prompt)
    ll.close()


def test_policies_are_given_as_objects_or_by_name(ll: Looseleaf, prompt: list[Any]) -> None:
    assert ll.plan(prompt, policy="first-k:3") == ll.plan(prompt, policy=FirstK(k=3))
    with pytest.raises(ConfigError, match="temprature"):
        ll.ask(prompt, temprature=1.0)


def test_plans_say_what_will_happen(ll: Looseleaf, prompt: list[Any]) -> None:
    before = ll.plan(prompt, policy="full-reuse")
    assert "compute alone, then reuse" in str(before)
    answer = ll.ask(prompt, policy="full-reuse", max_tokens=1)
    assert answer.plan == before
    assert "compute alone" not in str(ll.plan(prompt, policy="full-reuse"))
    assert answer.usage.fresh_tokens == answer.usage.prompt_tokens
