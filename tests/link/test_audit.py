"""An audit: approximate answers compared with re-prefill behind the scenes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from looseleaf import ConfigError, FullReuse, Looseleaf, Patched, PrefixCache
from looseleaf.bench import exact
from looseleaf.config import Config
from looseleaf.link import audit
from looseleaf.link.policies import Reprefill
from looseleaf.link.reference import Way, divergence

Open = Callable[..., Looseleaf]


def test_what_blind_reuse_loses_is_counted_and_patches_lose_less(opened: Open) -> None:
    ll = opened("qwen2_5_vl", audit=1.0)
    prompt = exact.make_prompts(ll, seed=3, count=1)[0]
    said = ll.ask(prompt, policy=FullReuse(), max_tokens=6)
    ll.settle()
    counters = ll.audited()
    assert (counters.answers, counters.tokens) == (1, len(said.token_ids))
    built = ll.builder.build(prompt)
    ways = [Way(prompt=built, policy=policy, answer=said.token_ids) for policy in (Reprefill(), FullReuse())]
    exact_logits, blind_logits = ll.reference.along(ways)
    assert counters.kl == pytest.approx(divergence(exact_logits, blind_logits), rel=1e-3)
    assert counters.worst_kl == counters.kl > 0
    assert counters.changed == bool((exact_logits.argmax(-1) != blind_logits.argmax(-1)).any())
    blind = counters.kl
    for _ in range(2):  # the first computes and leaves patches behind: exact, and not audited
        ll.ask(prompt, policy=Patched(share=1.0), max_tokens=6)
        ll.settle()
    assert counters.answers == 2
    assert counters.kl < 0.6 * blind


def test_only_a_share_of_approximate_answers_is_audited(opened: Open) -> None:
    ll = opened("qwen2", audit=0.5)
    prompt = exact.make_prompts(ll, seed=4, count=1)[0]
    ll.ask(prompt, policy=PrefixCache(), max_tokens=2)
    ll.settle()
    assert ll.audited().answers == 0
    for _ in range(40):
        ll.ask(prompt, policy=FullReuse(), max_tokens=1)
    ll.settle()
    assert 8 < ll.audited().answers < 32


def test_too_many_are_let_go_and_a_failure_harms_nobody(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    ll = opened("qwen2", audit=1.0)
    monkeypatch.setattr(audit, "WAITING", 2)
    prompt = exact.make_prompts(ll, seed=4, count=1)[0]
    with ll.engine.lock:  # nothing is worked off meanwhile
        for reply in [ll.submit(prompt, policy=FullReuse(), max_tokens=1) for _ in range(4)]:
            while not reply.job.done.is_set():
                ll.step()
    assert ll.engine.audit is not None
    assert ll.engine.audit.waiting <= 2
    monkeypatch.setattr(audit, "divergence", lambda *_: 1 / 0)
    ll.settle()
    counters = ll.audited()
    assert counters.dropped + counters.failed + counters.answers == 4
    assert counters.failed
    assert ll.ask(prompt, policy=FullReuse(), max_tokens=1).usage.approximate


def test_nothing_is_audited_unless_asked_for(opened: Open) -> None:
    ll = opened("qwen2")
    ll.ask(exact.make_prompts(ll, seed=4, count=1)[0], policy=FullReuse(), max_tokens=1)
    ll.settle()
    assert ll.audited().answers == 0
    with pytest.raises(ConfigError, match="audit"):
        Config(audit=2)
