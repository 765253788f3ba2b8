"""Shares with their interval, and the tokens a plan computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from PIL import Image as PILImages

from looseleaf import Looseleaf
from looseleaf.bench.report import Share
from looseleaf.demo.figures import plain
from looseleaf.demo.measure import PARTIAL, computed_tokens, policies_for
from looseleaf.prompt.segments import Image


def test_the_interval_is_wilsons() -> None:
    low, high = Share(right=9, n=10).interval
    assert (low, high) == (pytest.approx(0.596, abs=1e-3), pytest.approx(0.982, abs=1e-3))
    for right, n in ((0, 5), (5, 5), (6, 6), (0, 7), (250, 500)):
        low, high = Share(right=right, n=n).interval
        assert 0 <= low <= right / n <= high <= 1
    assert Share(right=0, n=8).interval[0] == 0.0
    assert Share(right=8, n=8).interval[1] == 1.0
    assert str(Share(right=8, n=8)) == "1.00 (0.68–1.00)"


def test_tokens_computed_are_counted_by_layer(opened: Callable[..., Looseleaf]) -> None:
    ll = opened("qwen2_5_vl")
    images = [Image(PILImages.new("RGB", (112, 112), colour)) for colour in ("red", "blue")]
    policies = policies_for(ll, images)
    ll.warm(images, layers=(len(ll.adapter.layout.layers) // 2,))
    plans = {name: ll.plan(["Look:", *images, "What?"], policy=policy) for name, policy in policies.items()}
    count = {name: computed_tokens(plan, len(ll.adapter.layout.layers)) for name, plan in plans.items()}
    tokens, reused = plans["reprefill"].tokens, 2 * (16 + 2)
    assert count["reprefill"] == count["prefix-cache"] == tokens
    assert count["full-reuse"] == tokens - reused
    for name in set(PARTIAL) - {"deviation"}:
        assert count[name] == pytest.approx(tokens - reused / 2, abs=1), name
    # all of two layers of four to choose by, then half
    assert count["deviation"] == pytest.approx(tokens - reused / 4, abs=1)


def test_words_are_shown_as_plain_letters_and_cut() -> None:
    assert plain("two\n words \x1b é $x$") == "two words ? ? $x$"
    assert plain("a" * 30, 10) == "aaaaaaa..."
