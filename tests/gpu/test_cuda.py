"""The same rules on a GPU. Run by hand where there is one: `pytest -m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from looseleaf import Auto, Config, Document, Looseleaf, Patched, Reprefill, Window
from looseleaf.bench import exact
from looseleaf.bench.calibrate import calibrate
from looseleaf.link.policies import Policy, policy_name
from looseleaf.link.reference import error
from looseleaf.model.loading import load_adapter
from looseleaf.model.tiny import FAMILIES, build_tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def ll(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looseleaf]:
    path = build_tiny(request.param, tmp_path_factory.mktemp("tiny") / request.param)
    with Looseleaf(load_adapter(path, device="cuda")) as opened:
        yield opened


@pytest.mark.parametrize("policy", exact.EVERYTHING, ids=policy_name)
def test_recomputing_everything_equals_a_plain_forward(ll: Looseleaf, policy: Policy) -> None:
    assert exact.full_recompute_error(ll, exact.make_prompts(ll, 1, 1)[0], policy) <= exact.TOLERANCE


def test_blind_reuse_equals_one_masked_forward(ll: Looseleaf) -> None:
    assert exact.mask_oracle_error(ll, exact.make_prompts(ll, 2, 1)[0]) <= exact.TOLERANCE


def test_relocated_keys_are_the_models_own_to_the_last_bit(ll: Looseleaf) -> None:
    assert exact.relocate_ulp(ll, exact.make_prompts(ll, 3, 1)[0], 12_345) == 0


def test_requests_packed_together_answer_as_alone(ll: Looseleaf) -> None:
    assert exact.packed_error(ll, exact.make_prompts(ll, 4, 3)) <= exact.TOLERANCE


def test_planted_mistakes_are_caught(ll: Looseleaf) -> None:
    assert all(exact.negative_controls(ll, exact.make_prompts(ll, 5, 1)[0]).values())


def test_a_model_off_the_gpu_and_on_it_agree(ll: Looseleaf, tmp_path: Path) -> None:
    prompt = exact.make_prompts(ll, 6, 1)[0]
    with Looseleaf(load_adapter(build_tiny(ll.adapter.name, tmp_path / ll.adapter.name))) as other:
        answers = [one.ask(prompt, policy="first-k:4", max_tokens=8, ignore_eos=True).token_ids for one in (ll, other)]
    assert answers[0] == answers[1]


def test_patched_in_full_is_re_prefill(ll: Looseleaf) -> None:
    whole, prompt = Patched(share=1.0), exact.make_prompts(ll, 7, 1)[0]
    ll.ask(prompt, policy=whole, max_tokens=1)
    ll.settle()
    built = ll.builder.build(prompt)
    assert ll.plan(prompt, policy=whole).count().patched > 0
    assert error(ll.reference.ours(built, whole), ll.reference.ours(built, Reprefill())) < 1e-3


def test_a_window_grows_slides_and_is_reopened(ll: Looseleaf, tmp_path: Path) -> None:
    window = Window(ll, policy=Auto(share=1.0, close="none"))
    for number in range(4):
        window.push(Document(f"Page {number} says {number * 7} and a little more than that."))
    answer = window.ask("what?", max_tokens=3, ignore_eos=True)
    prompt = [*(page.segment for page in window.pages), "what?"]
    assert answer.token_ids == ll.ask(prompt, policy=Reprefill(), max_tokens=3, ignore_eos=True).token_ids
    window.slide()
    kept = window.ask("and?", max_tokens=1)
    assert kept.usage.kept_tokens > 0
    window.save(tmp_path)
    again = Window.open(ll, tmp_path)
    assert again.nbytes == window.nbytes
    assert again.ask("and?", max_tokens=1).token_ids == kept.token_ids


def test_audits_and_calibrations_run(tmp_path: Path) -> None:
    path = build_tiny("qwen2", tmp_path / "qwen2")
    with Looseleaf(load_adapter(path, device="cuda"), Config(audit=1.0)) as opened:
        opened.ask(exact.make_prompts(opened, 3, 1)[0], policy="full-reuse", max_tokens=4)
        opened.settle()
        assert opened.audited().answers == 1
        assert calibrate(opened, count=1).ways["patch 100%"].kl < 1e-4
