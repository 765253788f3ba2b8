"""Choosing tokens: greedy is greedy, chance is seeded, filters keep what they promise, notes are log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from looseleaf import Looseleaf, Sampling
from looseleaf.engine.sampling import choose, make_generator
from looseleaf.errors import ConfigError, ModelError

CPU = torch.device("cpu")
HALVES = torch.tensor([0.125, 0.5, 0.125, 0.25]).log()
"""Odds that are powers of two, so that their sums are exact: token 1, then 3, then 0 and 2."""


def pick(logits: Tensor, **options: Any) -> int:
    sampling = Sampling(**options)
    tokens = [one.token for one in choose(logits[None].clone(), [sampling], [make_generator(sampling, CPU)])]
    return tokens[0]


def picks(logits: Tensor, count: int, **options: Any) -> list[int]:
    """Many draws from one generator."""
    sampling = Sampling(**options)
    generator = make_generator(sampling, CPU)
    return [choose(logits[None], [sampling], [generator])[0].token for _ in range(count)]


def some_logits(rows: int = 1, size: int = 50) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(3)) * 3


def test_temperature_zero_takes_the_likeliest_whatever_else_is_set() -> None:
    logits = some_logits()[0]
    best = int(logits.argmax())
    assert make_generator(Sampling(seed=1), CPU) is None
    for options in ({}, {"top_p": 0.01}, {"top_k": 3}, {"seed": 5}, {"logprobs": 2}):
        assert pick(logits, **options) == best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dtype_will_do(dtype: torch.dtype) -> None:
    logits = some_logits(size=600)[0].to(dtype)
    assert pick(logits) == int(logits.argmax())
    assert pick(logits, temperature=1.0, top_p=0.9, top_k=40, seed=1) in range(600)


def test_a_seed_decides_every_draw() -> None:
    logits = some_logits()[0]
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 30}
    assert picks(logits, 30, seed=1, **options) == picks(logits, 30, seed=1, **options)
    assert picks(logits, 30, seed=1, **options) != picks(logits, 30, seed=2, **options)
    assert picks(logits, 30, **options) != picks(logits, 30, **options), "without a seed every request is new"


@pytest.mark.parametrize("seed", [0, -1, 2**31, 2**62])
def test_ordinary_seeds_are_taken(seed: int) -> None:
    assert pick(some_logits()[0], temperature=1.0, seed=seed) in range(50)


def test_a_row_does_not_notice_its_neighbours() -> None:
    logits = some_logits(rows=4)
    options = [{"temperature": 1.0, "seed": 1}, {}, {"temperature": 2.0, "top_k": 5, "seed": 2}, {"logprobs": 3}]
    samplings = [Sampling(**one) for one in options]
    choices = choose(logits, samplings, [make_generator(one, CPU) for one in samplings])
    together, notes = [one.token for one in choices], [one.note for one in choices]
    alone = [pick(row, **one) for row, one in zip(logits, options, strict=True)]
    assert together == alone
    assert [note is not None for note in notes] == [False, False, False, True]


def test_logits_are_left_as_they_were() -> None:
    logits = some_logits(rows=2)
    before = logits.clone()
    samplings = [Sampling(temperature=0.5, top_k=3, top_p=0.5, seed=1, logprobs=5), Sampling()]
    choose(logits, samplings, [make_generator(one, CPU) for one in samplings])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_odds_at_this_temperature(temperature: float) -> None:
    drawn = picks(HALVES, 4000, temperature=temperature, seed=0)
    odds = torch.softmax(HALVES / temperature, dim=-1)
    for token in range(4):
        expected = float(odds[token])
        margin = 5 * math.sqrt(expected * (1 - expected) / 4000)
        assert drawn.count(token) / 4000 == pytest.approx(expected, abs=margin)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, {1}), (0.5, {1}), (0.500001, {1, 3}), (0.75, {1, 3}), (0.875, {1, 3, 0}), (0.876, {0, 1, 2, 3}),
     (1.0, {0, 1, 2, 3})],
)  # fmt: skip
def test_top_p_keeps_the_fewest_tokens_that_reach_it(top_p: float, kept: set[int]) -> None:
    drawn = set(picks(HALVES, 300, temperature=1.0, top_p=top_p, seed=0))
    # of two equally likely tokens either may be the one that crosses
    assert drawn == kept or (top_p == 0.875 and drawn == {1, 3, 2})


@pytest.mark.parametrize(("top_k", "kept"), [(1, {1}), (2, {1, 3}), (4, {0, 1, 2, 3}), (0, {0, 1, 2, 3}), (99, None)])
def test_top_k_keeps_the_k_likeliest(top_k: int, kept: set[int] | None) -> None:
    drawn = set(picks(HALVES, 300, temperature=1.0, top_k=top_k, seed=0))
    assert drawn == (kept or {0, 1, 2, 3})


def test_top_k_comes_before_top_p_and_the_rest_is_weighed_anew() -> None:
    assert set(picks(HALVES, 300, temperature=1.0, top_k=2, top_p=0.6, seed=0)) == {1}
    assert set(picks(HALVES, 300, temperature=1.0, top_k=2, top_p=0.7, seed=0)) == {1, 3}


def test_a_very_high_temperature_is_a_fair_die() -> None:
    assert set(picks(HALVES, 200, temperature=1e30, seed=0)) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "temperature",
    [
        1e-3,
        1e-30,
        pytest.param(
            1e-40,
        ),
    ],
)
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    logits = some_logits()[0]
    assert pick(logits, temperature=temperature, seed=0) == int(logits.argmax())


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((8,), -torch.inf)
    logits[5] = logits[6] = 1.0
    for options in ({}, {"top_k": 4}, {"top_p": 0.9}):
        assert set(picks(logits, 60, temperature=1.0, seed=0, **options)) <= {5, 6}


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6), temperature=st.floats(0.05, 5), top_p=st.floats(0.01, 1), top_k=st.integers(0, 40),
    size=st.integers(1, 40),
)  # fmt: skip
def test_whatever_is_drawn_was_allowed(seed: int, temperature: float, top_p: float, top_k: int, size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 4
    token = pick(logits, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    rank = int((logits > logits[token]).sum())
    assert rank < (top_k or size)
    odds = torch.softmax(logits / temperature, dim=-1)
    assert float(odds[logits > logits[token]].sum()) < top_p + 1e-4


def test_notes_are_log_probabilities_of_the_model_itself() -> None:
    logits = some_logits(rows=2)
    expected = torch.log_softmax(logits, dim=-1)
    samplings = [Sampling(logprobs=4), Sampling(logprobs=3, temperature=5.0, top_k=40, seed=2)]
    choices = choose(logits, samplings, [make_generator(one, CPU) for one in samplings])
    tokens, notes = [one.token for one in choices], [one.note for one in choices]
    for row, (token, note) in enumerate(zip(tokens, notes, strict=True)):
        assert note is not None
        assert note.token_id == token
        assert note.logprob == pytest.approx(float(expected[row, token]), abs=1e-5)
        values = [value for _, value in note.top]
        assert values == sorted(values, reverse=True)
        assert [one for one, _ in note.top] == logits[row].topk(len(note.top)).indices.tolist()
    assert notes[0] is not None
    assert notes[0].top[0] == (tokens[0], notes[0].logprob)
    assert [len(note.top) for note in notes if note] == [4, 3]


def test_no_likeliest_may_be_asked_for() -> None:
    notes = [one.note for one in choose(some_logits(), [Sampling(logprobs=0)], [None])]
    assert notes[0] is not None
    assert notes[0].top == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.0001),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("logprobs", -1),
        ("logprobs", 101),
        ("stop", "END"),
        ("stop", ("END", "")),
        pytest.param("max_tokens", 1.5),
        pytest.param("max_tokens", "3"),
        pytest.param("max_tokens", None),
        pytest.param("temperature", "hot"),
        pytest.param("temperature", None),
        pytest.param("top_p", "x"),
        pytest.param("top_k", 1.5),
        pytest.param("logprobs", 1.5),
        pytest.param("logprobs", True),
        pytest.param("seed", "x"),
        pytest.param("seed", 1.5),
        pytest.param("seed", 2**64),
        pytest.param("seed", -(2**63) - 1),
        pytest.param("stop", None),
        pytest.param("stop", (1,)),
        pytest.param("stop", (b"END",)),
    ],
)
def test_a_wrong_value_is_refused_at_birth_and_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=field):
        Sampling(**{field: value})


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 2**64},
        {"temperature": 1e-40},
        {"temperature": 1.0, "top_k": 1.5},
        {"logprobs": True},
    ],
    ids=str,
)
def test_a_request_whose_draw_fails_ends_alone(opened: Callable[..., Looseleaf], options: dict[str, Any]) -> None:
    ll = opened("qwen2")
    good = ll.engine.submit(ll.request("Say something.", max_tokens=4, ignore_eos=True))
    try:
        bad = ll.engine.submit(ll.request("Say something else.", max_tokens=4, **options))
    except ConfigError:
        bad = None
    try:
        for _ in range(20):
            ll.engine.step()
        assert good.answer is not None
        assert bad is None or bad.done.is_set()
        assert ll.engine.idle
    finally:
        ll.engine.close()


def test_a_row_whose_draw_fails_does_not_disturb_the_others() -> None:
    logits = torch.stack((torch.randn(20), torch.full((20,), float("nan")), torch.randn(20)))
    sampling = Sampling(temperature=1.0, seed=3)
    choices = choose(logits, [sampling] * 3, [make_generator(sampling, CPU) for _ in range(3)])
    alone = [choose(logits[row : row + 1], [sampling], [make_generator(sampling, CPU)])[0] for row in (0, 2)]
    assert [choices[0], choices[2]] == alone
    assert choices[1].error is not None


def test_logits_that_are_not_numbers_are_no_answer() -> None:
    logits = some_logits(3)
    logits[1, 7] = math.nan
    first, second, third = choose(logits, [Sampling()] * 3, [None] * 3)
    assert first.error is None
    assert third.error is None
    assert isinstance(second.error, ModelError)
