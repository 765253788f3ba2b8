"""What the reuse bench counts, and that it asks the real engine about chunks that are really reused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import Looseleaf
from looseleaf.bench import cases, reuse
from looseleaf.bench.cases import Arm
from looseleaf.bench.reuse import BLIND, CEILING, NOISE
from looseleaf.cli import main
from looseleaf.errors import ModelError
from looseleaf.link.policies import FullReuse, Reprefill
from looseleaf.link.reference import Way, divergence
from looseleaf.prompt.segments import Document, Image
from looseleaf.workloads.albums import HEADLINE
from looseleaf.workloads.bounds import HELD_OUT


def outcome(*, right: bool = True, kl: float = 0.0, changed: bool = False) -> Arm:
    return Arm(right=right, kl=kl, changed=changed, reused=0.5)


def test_eta_is_one_for_reprefill_and_zero_for_blind_reuse() -> None:
    blind = [outcome(kl=0.4, changed=True, right=False), outcome(kl=0.2)]
    half = [outcome(kl=0.2), outcome(kl=0.1, changed=True, right=False)]
    figures = reuse.score({CEILING: [outcome(), outcome()], BLIND: blind, "half": half, NOISE: [outcome(), outcome()]})
    assert figures[CEILING]["eta"] == 1
    assert figures[BLIND]["eta"] == 0
    assert figures["half"]["eta"] == pytest.approx(0.5)
    assert figures["half"]["accuracy"] == 0.5


def test_flips_are_what_blind_reuse_changes_and_an_arm_restores_some() -> None:
    blind = [outcome(changed=True), outcome(changed=True), outcome()]
    arm = [outcome(), outcome(changed=True), outcome(changed=True)]
    figures = reuse.score({CEILING: [outcome()] * 3, BLIND: blind, "arm": arm})
    assert [figures[one]["flips"] for one in figures] == [2, 2, 2]
    assert [figures[one]["restored"] for one in figures] == [2, 0, 1]
    assert figures["arm"]["changed"] == 2


def test_divergence_is_zero_for_equal_logits_and_what_the_formula_says() -> None:
    logits = torch.randn(3, 11, generator=torch.Generator().manual_seed(0))
    assert divergence(logits, logits + 5) == pytest.approx(0, abs=1e-9)
    fair, sure = torch.zeros(1, 2), torch.tensor([[0.0, 3.0]])
    p = torch.softmax(sure[0], 0)
    expected = 0.5 * float(torch.log(0.5 / p[0]) + torch.log(0.5 / p[1]))
    assert divergence(fair, sure) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ModelError, match="not numbers"):
        divergence(fair, torch.full((1, 2), torch.nan))


def test_items_come_again_by_seed_and_models_without_streams_are_asked_none() -> None:
    bounds = HELD_OUT["qwen3_vl"]
    assert "stream" not in cases.tasks(bounds)
    assert "stream" in cases.tasks(HELD_OUT["qwen2_5_vl"])
    first, again, other = ([one.question for one in cases.items(bounds, "change", 2, 3, seed)] for seed in (0, 0, 1))
    assert first == again != other
    assert all(one.hops == 2 and one.kind in ("changed_cell", "changed_to") for one in first)
    (words,) = cases.items(bounds, "documents as text", 2, 1, 0)
    assert sum(isinstance(one, Document) for one in words.chunks) == 2
    (pages,) = cases.items(bounds, "documents", 2, 1, 0)
    assert all(isinstance(one, Image) for one in pages.chunks)


@pytest.fixture(scope="module")
def asked(opened: Callable[..., Looseleaf]) -> tuple[Looseleaf, cases.Item, dict[str, Arm]]:
    ll = opened()
    (item,) = cases.items(HELD_OUT["qwen2_5_vl"], "clip", 2, 1, 0)
    (found,) = reuse.ask(ll, [item])
    return ll, item, found


def test_every_policy_is_asked_and_chunks_are_really_reused(
    asked: tuple[Looseleaf, cases.Item, dict[str, Arm]],
) -> None:
    ll, item, outcomes = asked
    assert outcomes[CEILING].kl < 1e-9
    assert outcomes[CEILING].reused == 0
    assert not outcomes[CEILING].changed
    assert outcomes[BLIND].reused > 0.4
    assert outcomes[BLIND].kl > 1e-4, "a random model's pictures do depend on each other"
    assert outcomes[NOISE].kl < 1e-6
    assert 0 < outcomes["first half"].reused < outcomes["first quarter"].reused < outcomes[BLIND].reused
    assert ll.warm(item.chunks) == 0


def test_logits_along_an_answer_are_the_engines(asked: tuple[Looseleaf, cases.Item, dict[str, Arm]]) -> None:
    ll, item, _ = asked
    prompt = ll.builder.build(item.prompt)
    for policy in (Reprefill(), FullReuse()):
        told = ll.ask(item.prompt, policy=policy, max_tokens=6, ignore_eos=True).token_ids
        way = Way(prompt=prompt, policy=policy, answer=told)
        (whole,) = ll.reference.along([way])
        assert tuple(whole.argmax(-1).tolist()) == told
        (pieces,) = ll.reference.along([replace(way, max_rows=16)])
        assert divergence(whole, pieces) < 1e-6


def test_reuse_prints_every_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = {"clip", "documents as text"}
    monkeypatch.setattr(cases, "HEADLINE", {task: HEADLINE[task] for task in tasks})
    plot, shape = tmp_path / "reuse.png", tmp_path / "deficit.png"
    command = ["bench", "reuse", "--quick", "--count", "1", "--model", "tiny:qwen3_vl"]
    assert main([*command, "--plot", str(plot), "--analyse", str(shape)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    summary = printed["summary"]["tiny:qwen3_vl"]
    for key in ("reprefill_multi", "blind_multi", "blind_single", "first_half_multi", "tokens25_multi", "noise_kl"):
        assert isinstance(summary[key], float)
    assert summary["reprefill_eta"] == 1
    assert summary["blind_eta"] == 0
    assert {row["task"] for row in printed["rows"]} == tasks
    assert {row["policy"] for row in printed["rows"]} >= {"deviation", "layer-adaptive", "query-aware", "low-rank-keys"}
    assert set(printed["details"]["deficit"]["tiny:qwen3_vl"]) == tasks
    assert plot.stat().st_size > 1000
    assert shape.stat().st_size > 1000


def test_other_benches_refuse_what_only_reuse_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "exact", "--count", "5"]) == 2
    assert main(["bench", "ttft", "--model", "a", "--model", "b"]) == 2
    assert main(["bench", "reuse", "--count", "0"]) == 2
    assert main(["bench", "reuse", "--model", "tiny:smolvlm"]) == 2
    told = capsys.readouterr().err
    assert "takes no --count" in told
    assert "no questions for smolvlm" in told
