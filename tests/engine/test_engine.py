"""The engine: continuous batching, cancelling, failing alone, and the same answer whoever else is running."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from looseleaf import (
    CancelledError,
    ClosedError,
    EngineConfig,
    FirstK,
    FullReuse,
    LimitError,
    Looseleaf,
    PrefixCache,
    QueueFullError,
    Reprefill,
)  # fmt: skip
from looseleaf.bench import exact
from looseleaf.engine.engine import Engine, Job
from looseleaf.link.sequence import Linked

Open = Callable[..., Looseleaf]


@pytest.fixture
def ll(opened: Open) -> Looseleaf:
    return opened("qwen2_5_vl")


@pytest.fixture
def prompts(ll: Looseleaf) -> list[Any]:
    return exact.make_prompts(ll, seed=21, count=3)


def finish(engine: Engine) -> int:
    steps = 0
    while engine.step():
        steps += 1
        assert steps < 10_000
    return steps


def submit(ll: Looseleaf, prompt: Any, **options: Any) -> Job:
    return ll.engine.submit(ll.request(prompt, **options))


def test_requests_join_and_leave_a_running_batch(ll: Looseleaf, prompts: list[Any]) -> None:
    first = submit(ll, prompts[0], max_tokens=12, ignore_eos=True)
    for _ in range(4):
        ll.engine.step()
    second = submit(ll, prompts[1], max_tokens=3, ignore_eos=True)
    finish(ll.engine)
    assert first.answer is not None
    assert second.answer is not None
    assert len(first.answer.token_ids) == 12
    assert first.answer.token_ids == ll.ask(prompts[0], max_tokens=12, ignore_eos=True).token_ids
    assert second.answer.finish_reason == "length"
    assert not ll.step()
    assert ll.engine.idle


def test_a_long_prompt_is_computed_in_pieces_while_others_decode(opened: Open, prompts: list[Any]) -> None:
    ll = opened("qwen2_5_vl", engine=EngineConfig(max_rows=16))
    short = submit(ll, ["Hi."], max_tokens=40, ignore_eos=True, policy=Reprefill())
    while not ll.engine._running or not next(iter(ll.engine._running.values())).answer:
        ll.engine.step()
    before = len(ll.engine._running[short.id].answer)
    long = submit(ll, prompts[0], max_tokens=2, policy=Reprefill())
    while long.id not in ll.engine._running or not ll.engine._running[long.id].linked.ready:
        ll.engine.step()
    decoded = len(ll.engine._running[short.id].answer) - before
    assert decoded >= len(long.request.prompt) // 16
    finish(ll.engine)


def test_no_step_computes_more_rows_than_the_budget(opened: Open, prompts: list[Any]) -> None:
    ll = opened("qwen2_5_vl", engine=EngineConfig(max_rows=20))
    ll.warm([one for prompt in prompts for one in prompt if not isinstance(one, str)])
    seen: list[int] = []
    run = ll.adapter.decoder.run

    def counted(lanes: Any) -> Any:
        seen.append(sum(len(entry.slots) for lane in lanes for entry in lane.entries.values()))
        return run(lanes)

    ll.adapter.decoder.run = counted  # type: ignore[method-assign]
    try:
        for prompt, policy in zip(prompts, (Reprefill(), FullReuse(), FirstK(k=4)), strict=True):
            submit(ll, prompt, policy=policy, max_tokens=4, ignore_eos=True)
        finish(ll.engine)
    finally:
        del ll.adapter.decoder.run  # type: ignore[method-assign]
    assert max(seen) <= 20


def test_cancelling_frees_the_seat_and_tells_the_caller(ll: Looseleaf, prompts: list[Any]) -> None:
    running, waiting = submit(ll, prompts[0], max_tokens=100), submit(ll, prompts[1])
    ll.engine.step()
    assert ll.engine.cancel(running)
    assert ll.engine.cancel(waiting)
    assert not ll.engine.cancel(running)
    assert isinstance(running.error, CancelledError)
    assert not ll.engine.step()
    assert ll.engine.idle
    assert all(len(slab.free) == slab.seats for slab in ll.linker.pool._slabs)


def test_a_full_line_is_refused_and_nothing_in_it_is_lost(opened: Open) -> None:
    ll = opened("qwen2_5_vl", engine=EngineConfig(max_waiting=2))
    jobs = [submit(ll, ["One"], max_tokens=2), submit(ll, ["Two"], max_tokens=2)]
    with pytest.raises(QueueFullError, match="2 requests"):
        submit(ll, ["Three"])
    finish(ll.engine)
    assert all(job.answer is not None for job in jobs)


def test_a_request_too_large_for_the_budget_is_refused_at_once(opened: Open) -> None:
    ll = opened("qwen2_5_vl", engine=EngineConfig(kv_budget_bytes=100_000))
    with pytest.raises(LimitError, match="kv_budget_bytes"):
        submit(ll, ["Hello"], max_tokens=1000)


def test_requests_wait_for_memory_and_keep_their_order(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    one = ll.request(["Hello"], max_tokens=8, ignore_eos=True)
    size = (len(one.prompt) + 8) * ll.adapter.layout.row_bytes
    ll = opened("qwen2_5_vl", engine=EngineConfig(kv_budget_bytes=2 * size))
    jobs = [submit(ll, ["Hello"], max_tokens=8, ignore_eos=True) for _ in range(5)]
    ends: list[int] = []
    for job in jobs:
        job.watchers.append(lambda job, progress: ends.append(job.id) if progress is None else None)
    while ll.engine.step():
        assert len(ll.engine._running) <= 2
    assert ends == sorted(ends)
    assert len(ends) == 5


def test_one_failing_request_does_not_end_the_others(
    ll: Looseleaf, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, other = (submit(ll, prompt, max_tokens=6, ignore_eos=True) for prompt in prompts)
    embed = Linked.embed

    def broken(linked: Linked, slots: Any) -> torch.Tensor:
        hidden = embed(linked, slots)
        return hidden[:, :7] if linked.prompt is bad.request.prompt else hidden

    monkeypatch.setattr(Linked, "embed", broken)
    finish(ll.engine)
    assert bad.error is not None
    for job, prompt in ((good, prompts[0]), (other, prompts[2])):
        assert job.answer is not None
        assert job.answer.token_ids == ll.reference.generate(ll.reference.stock(prompt), 6)


def test_a_seed_gives_the_same_answer_alone_and_in_a_batch(ll: Looseleaf, prompts: list[Any]) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 7, "max_tokens": 16, "ignore_eos": True}
    alone = submit(ll, prompts[0], **options)
    finish(ll.engine)
    jobs = [submit(ll, prompt, **options) for prompt in (prompts[1], prompts[0], prompts[2])]
    finish(ll.engine)
    assert jobs[1].answer is not None
    assert alone.answer is not None
    assert jobs[1].answer.token_ids == alone.answer.token_ids
    assert len(set(alone.answer.token_ids)) > 1


def test_stop_strings_and_limits_end_an_answer(ll: Looseleaf, prompts: list[Any]) -> None:
    whole = ll.ask(prompts[0], max_tokens=24, ignore_eos=True)
    cut = whole.text[6:9]
    stopped = ll.ask(prompts[0], max_tokens=24, ignore_eos=True, stop=(cut,))
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index(cut)]
    assert whole.finish_reason == "length"


def test_the_models_end_token_ends_an_answer(
    ll: Looseleaf, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ll.ask(prompts[0], max_tokens=8, ignore_eos=True)
    monkeypatch.setitem(ll.adapter.__dict__, "eos_ids", frozenset({whole.token_ids[3]}))
    ended = ll.ask(prompts[0], max_tokens=8)
    first = whole.token_ids.index(whole.token_ids[3])
    assert ended.finish_reason == "stop"
    assert ended.token_ids == whole.token_ids[: first + 1]


def test_logprobs_are_those_of_a_plain_forward(ll: Looseleaf, prompts: list[Any]) -> None:
    answer = ll.ask(prompts[0], max_tokens=1, ignore_eos=True, logprobs=5)
    given = ll.reference.stock(prompts[0])
    expected = torch.log_softmax(ll.reference.logits(given)[-1], dim=-1)
    assert answer.logprobs is not None
    for token, logprob in answer.logprobs[0].top:
        assert logprob == pytest.approx(float(expected[token]), abs=1e-4)


def test_closing_ends_what_runs_and_takes_no_more(opened: Open, prompts: list[Any]) -> None:
    ll = opened("qwen2_5_vl")
    job = submit(ll, prompts[0])
    ll.engine.step()
    ll.engine.close()
    assert isinstance(job.error, ClosedError)
    with pytest.raises(ClosedError):
        submit(ll, prompts[0])


def test_answers_count_every_token_of_the_prompt_once(ll: Looseleaf, prompts: list[Any]) -> None:
    ll.warm([one for one in prompts[0] if not isinstance(one, str)])
    for policy in exact.MIXED:
        usage = ll.ask(prompts[0], policy=policy, max_tokens=2).usage
        parts = (usage.exact_tokens, usage.relocated_tokens, usage.recomputed_tokens, usage.fresh_tokens)
        assert sum(parts) == usage.prompt_tokens
        assert usage.approximate is not isinstance(policy, Reprefill | PrefixCache)
        timing = usage.timing
        stages = (
            timing.prepare_s + timing.queue_s + timing.vision_s + timing.chunks_s + timing.link_s + timing.prefill_s
        )
        assert 0 < stages <= timing.ttft_s * 1.05
