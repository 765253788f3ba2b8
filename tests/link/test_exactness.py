"""The golden rule: reuse machinery changes nothing when it must not. One line of POLICIES a policy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from looseleaf import Document, FullReuse, Looseleaf
from looseleaf.bench import exact
from looseleaf.link.policies import POLICIES, Policy, policy_name
from looseleaf.model.tiny import FAMILIES

Open = Callable[..., Looseleaf]


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest, opened: Open) -> Looseleaf:
    return opened(request.param)


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
@pytest.mark.parametrize("policy", exact.EVERYTHING, ids=policy_name)
def test_recomputing_everything_equals_a_plain_forward(family: Looseleaf, policy: Policy) -> None:
    for prompt in exact.make_prompts(family, seed=3, count=2):
        assert exact.full_recompute_error(family, prompt, policy) <= exact.TOLERANCE


def test_the_golden_rule_covers_every_policy() -> None:
    covered = {type(policy) for policy in exact.EVERYTHING}
    blind = {FullReuse}  # computes nothing of a chunk: the mask oracle is its rule
    assert covered | blind == set(POLICIES.values())


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_greedy_answers_equal_generate(family: Looseleaf) -> None:
    assert exact.greedy_equal(family, exact.make_prompts(family, seed=4, count=1)[0])


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
@pytest.mark.parametrize("canonical", ["preamble", "none"])
def test_blind_reuse_equals_one_masked_forward(family: Looseleaf, canonical: str, opened: Open) -> None:
    ll = opened(family.adapter.name, canonical=canonical)
    for prompt in exact.make_prompts(ll, seed=5, count=2):
        assert exact.mask_oracle_error(ll, prompt) <= exact.TOLERANCE


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_planted_mistakes_are_caught(family: Looseleaf) -> None:
    prompt = exact.make_prompts(family, seed=6, count=1)[0]
    assert all(exact.negative_controls(family, prompt).values())


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
@pytest.mark.parametrize("shift", [1, 100_000])
def test_relocated_keys_are_the_models_own_to_the_last_bit(family: Looseleaf, shift: int) -> None:
    assert exact.relocate_ulp(family, exact.make_prompts(family, seed=7, count=1)[0], shift) == 0


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_requests_packed_together_answer_as_alone(family: Looseleaf) -> None:
    assert exact.packed_error(family, exact.make_prompts(family, seed=8, count=3)) <= exact.TOLERANCE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_moving_a_prompt_costs_no_more_than_moving_costs_the_model_itself(opened: Open, dtype: str) -> None:
    ll = opened("qwen2_5_vl", dtype)
    assert exact.shift_noise_ratio(ll, exact.make_prompts(ll, seed=9, count=5)) <= 2


def test_text_documents_are_reused_beside_images(opened: Open) -> None:
    ll = opened("qwen3_vl")
    image = exact.make_prompts(ll, seed=10, count=1)[0][1]
    prompt = ["Read", Document("The red square is number four."), "and look at", image, "then answer."]
    given = ll.reference.stock(["Read", "x"])  # documents have no processor form: compare with the ids themselves
    assert given.prompt.ids[:2] == ll.builder.build(prompt).ids[:2]
    plan = ll.plan(prompt, policy=FullReuse())
    assert [piece.what for piece in plan.pieces if piece.use == "reuse"] == ["document", "image"]
    answer = ll.ask(prompt, policy=FullReuse(), max_tokens=4)
    again = ll.ask(prompt, policy=FullReuse(), max_tokens=4)
    assert again.usage.relocated_tokens > 0
    assert again.token_ids == answer.token_ids
