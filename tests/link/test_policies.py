"""Policies are named, parsed and checked, and what they say to compute is sensible at every edge."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.errors import ConfigError, PolicyError
from looseleaf.link.policies import (
    POLICIES,
    DeepLayers,
    Deviation,
    FirstK,
    FullReuse,
    LayerAdaptive,
    LowRankKeys,
    Policy,
    PrefixCache,
    QueryAware,
    Reprefill,
    Select,
    Stage,
    parse_policy,
    policy_name,
)

SHARES = st.floats(0, 1, allow_nan=False)
SOME_POLICY = st.one_of(
    st.just(Reprefill()),
    st.just(PrefixCache()),
    st.builds(FullReuse, relocate=st.booleans(), two_step=st.booleans()),
    st.builds(FirstK, k=st.integers(0, 10**6), relocate=st.booleans()),
    st.builds(Deviation, ratio=SHARES),
    st.builds(LayerAdaptive, ratio=SHARES),
    st.builds(QueryAware, ratio=SHARES),
    st.builds(LowRankKeys, rank=st.integers(1, 10**6)),
    st.builds(DeepLayers, from_layer=st.integers(0, 10**6)),
)


def test_policies_go_by_these_names() -> None:
    assert list(POLICIES) == [
        "reprefill", "prefix-cache", "full-reuse", "first-k", "deviation", "layer-adaptive", "query-aware",
        "low-rank-keys", "deep-layers", "patched", "auto",
    ]  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_a_bare_name_is_the_policy_with_its_defaults(name: str) -> None:
    assert parse_policy(name) == POLICIES[name]()
    assert parse_policy(name + ":") == POLICIES[name]()
    assert parse_policy(f" {name} ") == POLICIES[name]()


@settings(max_examples=200, deadline=None)
@given(SOME_POLICY)
def test_a_policys_name_says_everything_about_it(policy: Policy) -> None:
    assert parse_policy(policy_name(policy)) == policy


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        (Reprefill(), "reprefill"),
        (PrefixCache(), "prefix-cache"),
        (FullReuse(), "full-reuse:relocate=true"),
        (FullReuse(relocate=False, two_step=True), "full-reuse:relocate=false,two_step=true"),
        (FirstK(), "first-k:k=32"),
        (FirstK(k=8, relocate=False), "first-k:k=8,relocate=false"),
        (Deviation(ratio=0.25), "deviation:ratio=0.25"),
        (LowRankKeys(rank=4), "low-rank-keys:rank=4"),
        (DeepLayers(from_layer=2), "deep-layers:from_layer=2"),
    ],
)
def test_names_are_short_and_plain(policy: Policy, name: str) -> None:
    assert policy_name(policy) == name


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("first-k:32", FirstK(k=32)),
        ("first-k:0", FirstK(k=0)),
        ("first-k:k=32,relocate=false", FirstK(k=32, relocate=False)),
        ("first-k:relocate=no", FirstK(relocate=False)),
        ("first-k:8,false", FirstK(k=8, relocate=False)),
        ("full-reuse:FALSE", FullReuse(relocate=False)),
        ("full-reuse:relocate=1,two_step=YES", FullReuse(two_step=True)),
        ("deviation:1", Deviation(ratio=1.0)),
        ("deviation:ratio=1e-3", Deviation(ratio=0.001)),
        pytest.param(
            "first-k: k=32, relocate=false", FirstK(k=32, relocate=False),
        ),
    ],
)  # fmt: skip
def test_fields_follow_by_place_or_by_name(text: str, policy: Policy) -> None:
    assert parse_policy(text) == policy


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown policy ''; there are reprefill, prefix-cache"),
        ("nope", "unknown policy 'nope'; there are reprefill"),
        ("First-K", "unknown policy"),
        ("first_k", "unknown policy"),
        (":32", "unknown policy"),
        ("first-k=32", "unknown policy"),
        ("first-k:x", "first-k: k must be a.* int, got 'x'"),
        ("first-k:1.5", "first-k: k must be a.* int, got '1.5'"),
        ("first-k:k=", "first-k: k must be a.* int, got ''"),
        ("first-k:-1", "first-k: k must be >= 0, got -1"),
        ("first-k:n=3", "first-k has no field 'n'; it has k, relocate"),
        ("first-k:=3", "first-k has no field ''"),
        ("first-k:1,true,7", "first-k has no field '7'"),
        ("first-k:relocate=maybe", "relocate must be a bool, got 'maybe'"),
        ("first-k:relocate=2", "relocate must be a bool, got '2'"),
        ("prefix-cache:1", "prefix-cache has no field '1'; it has no fields"),
        ("reprefill:k=1", "reprefill has no field 'k'; it has no fields"),
        ("deviation:1.01", "deviation: ratio must be between 0 and 1, got 1.01"),
        ("deviation:-0.01", "deviation: ratio must be between 0 and 1"),
        ("deviation:nan", "deviation: ratio must be between 0 and 1"),
        ("deviation:inf", "deviation: ratio must be between 0 and 1"),
        ("layer-adaptive:2", "layer-adaptive: ratio must be between 0 and 1"),
        ("query-aware:2", "query-aware: ratio must be between 0 and 1"),
        ("low-rank-keys:0", "low-rank-keys: rank must be >= 1, got 0"),
        ("deep-layers:-1", "deep-layers: from_layer must be >= 0, got -1"),
        pytest.param("first-k:k=1,k=2", "k"),
        pytest.param("first-k:1,k=2", "k"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_what_can(text: str, says: str) -> None:
    with pytest.raises(PolicyError, match=says):
        parse_policy(text)


def test_a_wrong_policy_is_a_wrong_setting() -> None:
    assert issubclass(PolicyError, ConfigError)
    assert PolicyError.status == 400


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (FirstK, {"k": -1}),
        (Deviation, {"ratio": -0.1}),
        (Deviation, {"ratio": 1.1}),
        (Deviation, {"ratio": float("nan")}),
        (LayerAdaptive, {"ratio": 1.5}),
        (QueryAware, {"ratio": -1}),
        (LowRankKeys, {"rank": 0}),
        (DeepLayers, {"from_layer": -1}),
        pytest.param(FirstK, {"k": "3"}),
        pytest.param(FirstK, {"k": 1.5}),
        pytest.param(FirstK, {"k": None}),
        pytest.param(FullReuse, {"relocate": "false"}),
        pytest.param(Deviation, {"ratio": "0.5"}),
        pytest.param(LowRankKeys, {"rank": 2.5}),
        pytest.param(DeepLayers, {"from_layer": 0.5}),
    ],
)
def test_a_field_out_of_range_or_of_another_type_is_refused_at_birth(kind: type, fields: dict[str, Any]) -> None:
    with pytest.raises(PolicyError, match=next(iter(fields))):
        kind(**fields)


def test_unknown_fields_are_errors_and_policies_are_values() -> None:
    with pytest.raises(TypeError):
        FirstK(n=3)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        FirstK().k = 3  # type: ignore[misc]
    assert FirstK(k=3) == FirstK(k=3) != FirstK(k=4)
    assert len({FirstK(k=3), FirstK(k=3), FirstK(k=4), FullReuse()}) == 3


def test_a_policy_of_ones_own_has_a_name_too() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class EveryOther(Policy):
        pass

    assert "every" in policy_name(EveryOther()).lower()


@settings(max_examples=400, deadline=None)
@given(SOME_POLICY, st.sampled_from([0, 1, 2, 7, 64, 1000]), st.sampled_from([1, 2, 3, 4, 28]))
def test_stages_stay_inside_the_chunk_and_the_model_and_never_grow(policy: Policy, tokens: int, layers: int) -> None:
    if isinstance(policy, DeepLayers) and policy.from_layer >= layers:
        with pytest.raises(PolicyError, match=f"below the model's {layers} layers"):
            policy.stages(tokens, layers)
        return
    stages = policy.stages(tokens, layers)
    at = [stage.layer for stage in stages]
    assert at == sorted(set(at))
    assert all(0 <= layer <= layers for layer in at)
    before = tokens
    for stage in stages:
        if isinstance(stage.rows, Select):
            assert 0 <= stage.rows.share <= 1
            assert stage.rows.by in ("deviation", "attention")
        else:
            assert stage.rows.start == 0
            assert stage.rows.step == 1
            assert len(stage.rows) <= before
            before = len(stage.rows)


@pytest.mark.parametrize("policy", [Reprefill(), PrefixCache(), FullReuse(), LowRankKeys()])
def test_some_policies_compute_nothing_of_a_reused_chunk(policy: Policy) -> None:
    assert policy.stages(64, 4) == ()


def test_first_k_takes_k_or_all_there_are() -> None:
    assert FirstK(k=32).stages(64, 4) == (Stage(layer=0, rows=range(32)),)
    assert FirstK(k=32).stages(5, 4) == (Stage(layer=0, rows=range(5)),)
    assert FirstK(k=0).stages(5, 4) == (Stage(layer=0, rows=range(0)),)
    assert FirstK(k=5).stages(0, 1) == (Stage(layer=0, rows=range(0)),)


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_deviation_sees_two_layers_of_everything_and_then_chooses(ratio: float) -> None:
    first, then = Deviation(ratio=ratio).stages(10, 4)
    assert first == Stage(layer=0, rows=range(10))
    assert then == Stage(layer=2, rows=Select(by="deviation", share=ratio))
    for layers in (1, 2):
        assert Deviation(ratio=ratio).stages(10, layers)[1].layer == layers, "nothing is left to choose for"


@pytest.mark.parametrize(("ratio", "computed"), [(0.0, 0), (1.0, 10)])
@pytest.mark.parametrize("layers", [1, 2, 7])
def test_layer_adaptive_at_its_ends_is_nothing_or_everything(ratio: float, computed: int, layers: int) -> None:
    assert LayerAdaptive(ratio=ratio).stages(10, layers) == (Stage(layer=0, rows=range(computed)),)


@pytest.mark.parametrize("ratio", [0.05, 0.1, 0.5, 0.75, 0.9])
@pytest.mark.parametrize(
    "layers",
    [
        pytest.param(1),
        2,
        3,
        28,
    ],
)
def test_layer_adaptive_computes_its_ratio_on_average(ratio: float, layers: int) -> None:
    stages = LayerAdaptive(ratio=ratio).stages(10_000, layers)
    shares = []
    for layer in range(layers):
        rows = [stage.rows for stage in stages if stage.layer <= layer][-1]
        assert isinstance(rows, range)
        shares.append(len(rows) / 10_000)
    assert sum(shares) / layers == pytest.approx(ratio, abs=1e-3)
    assert shares == sorted(shares, reverse=True)


def test_query_aware_chooses_for_all_layers_at_once() -> None:
    assert QueryAware(ratio=1).stages(10, 4) == (Stage(layer=0, rows=Select(by="attention", share=1)),)


def test_deep_layers_enter_with_stored_states_unless_they_start_at_the_bottom() -> None:
    assert DeepLayers(from_layer=0).stages(10, 4) == (Stage(layer=0, rows=range(10), from_states=False),)
    assert DeepLayers(from_layer=3).stages(10, 4) == (Stage(layer=3, rows=range(10), from_states=True),)
    assert DeepLayers(from_layer=0).stages(10, 1)
    with pytest.raises(PolicyError, match="4 layers, got 4"):
        DeepLayers(from_layer=4).stages(10, 4)


def test_what_a_policy_reuses_is_told_by_its_class() -> None:
    told = {name: (kind().reuses_chunks, kind.uses_prefix) for name, kind in POLICIES.items()}
    assert told.pop("reprefill") == (False, False)
    assert told.pop("prefix-cache") == (False, True)
    assert told.pop("auto") == (True, True)
    assert set(told.values()) == {(True, False)}
    assert LowRankKeys(rank=5).keys_rank == 5
    assert FirstK().keys_rank is None
    assert not FullReuse(relocate=False).relocate
    assert FullReuse(two_step=True).two_step
