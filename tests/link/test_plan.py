"""Plans: what is read and what is computed, decided without a tensor; exactness is never claimed where it is not."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImages

from looseleaf import Clip, Image, Looseleaf
from looseleaf.errors import PolicyError
from looseleaf.link.plan import Count, Known, Lookup, Plan, flatten, plan_link
from looseleaf.link.policies import (
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
)
from looseleaf.model.adapter import Placement
from looseleaf.prompt.chunks import Canonical, Chunk, Prompt, assemble

CANONICAL = Canonical(ids=(1, 2, 3))
LAYERS = 4


def chunk(tokens: int, *, advance: int | None = None, kind: str = "image") -> Chunk:
    """A chunk of so many tokens; an image of two dimensions advances by less than its tokens."""
    positions = torch.arange(tokens)[None]
    return Chunk(
        kind=kind, content=f"{kind} {tokens}", ids=(99,) * tokens,
        placement=Placement(positions=positions, advance=tokens if advance is None else advance),
    )  # fmt: skip


def prompt(*pieces: tuple[int, ...] | Chunk, start_pos: int = 0) -> Prompt:
    return assemble(list(pieces), axes=1, start_pos=start_pos)


def plan(
    given: Prompt,
    policy: Policy,
    *,
    stored: bool | Sequence[bool] = True,
    prefix: int = 0,
    layers: int = LAYERS,
    canonical: Canonical = CANONICAL,
) -> Plan:
    held = [stored] * len(given.chunks) if isinstance(stored, bool) else stored
    lookup = Lookup(prefix_tokens=prefix, chunks=tuple(Known(kv=one, features=one) for one in held))
    return plan_link(given, lookup, policy, layers=layers, canonical=canonical)


def uses(made: Plan) -> list[str]:
    return [piece.use for piece in made.pieces]


TWO = prompt((1, 2, 3), chunk(10), (7, 8), chunk(20), (9, 9, 9, 9, 9))
"""[0, 3) the canonical preamble, [3, 13) an image at home, [13, 15) text, [15, 35) an image elsewhere, [35, 40) text"""


def test_reprefill_computes_everything_in_one_go() -> None:
    made = plan(TWO, Reprefill(), prefix=32)
    assert uses(made) == ["compute"] * 5
    assert [flatten(rows.slots) for rows in made.rows] == [list(range(40))]
    assert made.count() == Count(fresh=40)
    assert not made.approximate
    assert not made.missing


@pytest.mark.parametrize(("stored", "read"), [(0, 0), (1, 1), (3, 3), (13, 13), (20, 20), (39, 39), (40, 39), (64, 39)])
def test_a_prefix_is_read_and_the_last_token_always_computed(stored: int, read: int) -> None:
    made = plan(TWO, PrefixCache(), prefix=stored)
    assert made.prefix_tokens == read
    assert flatten(made.rows[0].slots) == list(range(read, 40))
    assert made.count() == Count(exact=read, fresh=40 - read)
    assert not made.approximate
    assert uses(made) == ["exact" if piece.stop <= read else "compute" for piece in made.pieces]


def test_a_prompt_of_one_token_is_computed_whatever_is_stored() -> None:
    made = plan(prompt((5,)), PrefixCache(), prefix=32)
    assert made.prefix_tokens == 0
    assert flatten(made.rows[0].slots) == [0]


@pytest.mark.parametrize("policy", [Reprefill(), FullReuse(), FirstK(), Deviation(), LowRankKeys()])
def test_only_the_prefix_cache_reads_prefixes(policy: Policy) -> None:
    assert plan(TWO, policy, prefix=32).prefix_tokens == 0


def test_full_reuse_computes_text_alone() -> None:
    made = plan(TWO, FullReuse())
    assert uses(made) == ["compute", "reuse", "compute", "reuse", "compute"]
    assert flatten(made.rows[0].slots) == [0, 1, 2, 13, 14, *range(35, 40)]
    assert made.count() == Count(exact=10, relocated=20, fresh=10)


def test_a_chunk_behind_the_canonical_context_is_exact_and_taint_starts_at_the_next() -> None:
    made = plan(TWO, FullReuse())
    assert [piece.exact for piece in made.pieces][:4] == [True, True, True, False]
    assert made.exact_tokens == 15
    assert made.approximate
    assert not plan(prompt((1, 2, 3), chunk(10), (7,)), FullReuse()).approximate


def test_whatever_stands_behind_an_approximate_chunk_is_approximate() -> None:
    made = plan(TWO, FullReuse())
    assert [piece.exact for piece in made.pieces] == [piece.stop <= made.exact_tokens for piece in made.pieces]


@pytest.mark.parametrize(
    "elsewhere",
    [
        prompt((1, 2, 3, 4), chunk(10), (7,)),
        prompt((1, 2), chunk(10), (7,)),
        prompt((1, 2, 4), chunk(10), (7,)),
        prompt((3, 2, 1), chunk(10), (7,)),
        prompt(chunk(10), (7,)),
        prompt((1, 2, 3), chunk(10), (7,), start_pos=1),
        prompt((1, 2, 3), chunk(10), (7,), start_pos=-1),
        prompt((1, 2, 3), (4,), chunk(10), (7,)),
    ],
    ids=["longer", "shorter", "other", "turned", "none", "shifted", "shifted back", "split"],
)
def test_anywhere_else_it_is_approximate(elsewhere: Prompt) -> None:
    made = plan(elsewhere, FullReuse())
    assert made.exact_tokens == elsewhere.chunks[0].start
    assert made.count().relocated == 10


def test_without_a_canonical_context_home_is_the_very_start() -> None:
    nothing = Canonical(ids=())
    assert not plan(prompt(chunk(10), (7,)), FullReuse(), canonical=nothing).approximate
    assert plan(prompt((1,), chunk(10), (7,)), FullReuse(), canonical=nothing).approximate
    assert plan(prompt(chunk(10), (7,), start_pos=5), FullReuse(), canonical=nothing).approximate


@pytest.mark.parametrize("policy", [FirstK(k=4), Deviation(), LayerAdaptive(), QueryAware(), DeepLayers(from_layer=2)])
def test_nothing_of_a_chunk_at_home_is_computed_again(policy: Policy) -> None:
    made = plan(prompt((1, 2, 3), chunk(10), (7,)), policy)
    assert {slot for rows in made.rows for slot in flatten(rows.slots)} == {0, 1, 2, 13}
    assert made.count() == Count(exact=10, fresh=4)
    assert all(rows.select is None for rows in made.rows)


def test_low_rank_keys_are_approximate_even_at_home() -> None:
    made = plan(TWO, LowRankKeys(rank=2))
    assert made.exact_tokens == 3
    assert made.keys_rank == 2
    assert made.needs_oracle
    assert made.missing == ()


def test_a_chunk_at_the_end_of_a_prompt_is_computed() -> None:
    made = plan(prompt((1, 2, 3, 4), chunk(10)), FullReuse())
    assert uses(made) == ["compute", "compute"]
    assert not made.approximate
    made = plan(prompt(chunk(10)), FirstK(), canonical=Canonical(ids=()))
    assert made.count() == Count(fresh=10)


def test_missing_chunks_are_named_by_their_place_and_counted_as_fresh() -> None:
    assert plan(TWO, FullReuse(), stored=[True, False]).missing == (1,)
    assert plan(TWO, FullReuse(), stored=[False, True]).missing == (0,)
    made = plan(TWO, FullReuse(), stored=False)
    assert made.missing == (0, 1)
    assert made.count() == Count(fresh=40)
    assert made.exact_tokens == 15, "computed alone first, so approximate all the same"
    assert plan(TWO, Reprefill(), stored=False).missing == ()
    assert plan(TWO, PrefixCache(), stored=False).missing == ()


def test_a_chunk_that_is_computed_anyway_is_not_missing() -> None:
    made = plan(TWO, FirstK(k=10), stored=False)
    assert uses(made) == ["compute", "compute", "compute", "reuse", "compute"]
    assert made.missing == (1,)
    assert plan(TWO, FirstK(k=20), stored=False).missing == ()


def test_first_k_of_all_chunks_is_a_plain_prefill() -> None:
    everything = plan(TWO, Reprefill())
    for policy in (FirstK(k=20), FirstK(k=10**6), LayerAdaptive(ratio=1.0), DeepLayers(from_layer=0)):
        made = plan(TWO, policy)
        assert (made.pieces, made.rows, made.exact_tokens) == (everything.pieces, everything.rows, 40)


def test_first_k_of_none_is_full_reuse() -> None:
    for policy in (FirstK(k=0), LayerAdaptive(ratio=0.0)):
        made, full = plan(TWO, policy), plan(TWO, FullReuse())
        assert (made.pieces, made.rows) == (full.pieces, full.rows)


def test_first_k_computes_the_head_of_each_chunk_away_from_home() -> None:
    made = plan(TWO, FirstK(k=4))
    assert flatten(made.rows[0].slots) == [0, 1, 2, 13, 14, 15, 16, 17, 18, *range(35, 40)]
    assert made.rows[0].slots == (range(3), range(13, 19), range(35, 40))
    assert made.count() == Count(exact=10, relocated=16, recomputed=4, fresh=10)
    assert made.splittable


def test_deviation_computes_all_rows_low_down_and_then_selects() -> None:
    made = plan(TWO, Deviation(ratio=0.25))
    low, high = made.rows
    assert (low.layer, high.layer) == (0, 2)
    assert flatten(low.slots) == [0, 1, 2, *range(13, 40)]
    assert flatten(high.slots) == [0, 1, 2, 13, 14, *range(35, 40)]
    assert high.select is not None
    assert high.select.share == 0.25
    assert not made.splittable
    assert not made.needs_oracle


@pytest.mark.parametrize("layers", [1, 2])
def test_deviation_has_nothing_to_select_in_a_shallow_model(layers: int) -> None:
    made = plan(TWO, Deviation(ratio=0.25), layers=layers)
    assert [rows.layer for rows in made.rows] == [0]
    assert flatten(made.rows[0].slots) == [0, 1, 2, *range(13, 40)]


def test_layer_adaptive_shrinks_with_depth() -> None:
    made = plan(TWO, LayerAdaptive(ratio=0.5))
    sizes = [sum(map(len, rows.slots)) for rows in made.rows]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 10 + 20
    assert sizes[-1] == 10
    assert made.splittable


def test_query_aware_asks_the_oracle() -> None:
    made = plan(TWO, QueryAware(ratio=0.5))
    assert made.needs_oracle
    assert made.count().recomputed == 10


def test_deep_layers_start_from_states_at_their_layer() -> None:
    made = plan(TWO, DeepLayers(from_layer=2))
    low, high = made.rows
    assert (low.layer, low.from_states, high.layer, high.from_states) == (0, False, 2, True)
    assert set(flatten(high.slots)) - set(flatten(low.slots)) == set(range(15, 35))
    with pytest.raises(PolicyError, match="4 layers"):
        plan(TWO, DeepLayers(from_layer=4))


def test_the_plan_carries_the_policys_switches() -> None:
    made = plan(TWO, FullReuse(relocate=False, two_step=True))
    assert not made.relocate
    assert made.two_step
    assert made.policy == "full-reuse:relocate=false,two_step=true"


def test_the_same_chunk_twice_is_two_pieces() -> None:
    image = chunk(10)
    made = plan(prompt((4,), image, (5,), image, (6,)), FullReuse(), stored=False)
    assert made.missing == (0, 1)
    assert [(piece.start, piece.stop) for piece in made.pieces] == [(0, 1), (1, 11), (11, 12), (12, 22), (22, 23)]


def test_a_plan_holds_no_tensor() -> None:
    def look(value: Any) -> None:
        assert not isinstance(value, torch.Tensor)
        for one in value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ():
            look(one)

    for policy in (FirstK(k=4), Deviation(), QueryAware(), DeepLayers(from_layer=1)):
        look(dataclasses.asdict(plan(TWO, policy)))
    assert plan(TWO, FirstK(k=4)) == plan(TWO, FirstK(k=4))


def test_a_printed_plan_says_what_happens_to_every_span() -> None:
    assert str(plan(TWO, FirstK(k=4), stored=[True, False])).startswith(
        "first-k:k=4: 40 tokens = 10 exact + 0 relocated + 0 recomputed + 30 fresh; approximate from token 15\n"
        "  [     0,      3)  text      compute\n"
        "  [     3,     13)  image     reuse\n"
        "  [    13,     15)  text      compute\n"
        "  [    15,     35)  image     compute alone, then reuse, 4 tokens in context  ~\n"
        "  [    35,     40)  text      compute"
    )
    assert str(plan(TWO, Reprefill())).startswith(
        "reprefill: 40 tokens = 0 exact + 0 relocated + 0 recomputed + 40 fresh; exact\n"
    )


def test_a_printed_plan_says_how_far_the_prefix_reaches_into_a_span() -> None:
    printed = str(plan(prompt(tuple(range(40))), PrefixCache(), prefix=32))
    assert "32" in printed.split("\n", 1)[1]


PIECES = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.integers(1, 6)),
        st.tuples(st.just("image"), st.integers(1, 12)),
        st.tuples(st.just("document"), st.integers(1, 12)),
    ),
    min_size=1, max_size=7,
)  # fmt: skip
SHARES = st.sampled_from([0.0, 0.05, 0.5, 0.95, 1.0])
SOME_POLICY = st.one_of(
    st.just(Reprefill()),
    st.just(PrefixCache()),
    st.builds(FullReuse, relocate=st.booleans(), two_step=st.booleans()),
    st.builds(FirstK, k=st.integers(0, 14)),
    st.builds(Deviation, ratio=SHARES),
    st.builds(LayerAdaptive, ratio=SHARES),
    st.builds(QueryAware, ratio=SHARES),
    st.builds(LowRankKeys, rank=st.integers(1, 4)),
    st.builds(DeepLayers, from_layer=st.integers(0, 1)),
)


@settings(max_examples=400, deadline=None)
@given(
    pieces=PIECES, policy=SOME_POLICY, prefix=st.integers(0, 100), layers=st.sampled_from([2, 3, 4, 9]),
    at_home=st.booleans(), chance=st.randoms(use_true_random=False),
)  # fmt: skip
def test_every_plan_keeps_the_rules(
    pieces: list[tuple[str, int]], policy: Policy, prefix: int, layers: int, at_home: bool, chance: random.Random
) -> None:
    parts: list[tuple[int, ...] | Chunk] = [(1, 2, 3)] if at_home else [(4,)]
    for kind, size in pieces:
        parts.append(tuple(chance.randrange(9) for _ in range(size)) if kind == "text" else chunk(size, kind=kind))
    whole = prompt(*parts)
    held = [chance.random() < 0.5 for _ in whole.chunks]
    made = plan(whole, policy, stored=held, prefix=prefix, layers=layers)
    slots = [set(flatten(rows.slots)) for rows in made.rows]

    # every token is in one piece and counted once
    assert [piece.start for piece in made.pieces] == [0, *(piece.stop for piece in made.pieces[:-1])]
    assert made.pieces[-1].stop == made.tokens == len(whole)
    count = made.count()
    assert count.exact + count.relocated + count.recomputed + count.fresh == len(whole)
    assert min(dataclasses.astuple(count)) >= 0

    # rows: from the bottom up, in order, without overlap; the last token is computed in every layer
    assert made.rows[0].layer == 0
    layer_of = [rows.layer for rows in made.rows]
    assert layer_of == sorted(set(layer_of))
    assert layer_of[-1] < layers
    for rows, chosen in zip(made.rows, slots, strict=True):
        assert flatten(rows.slots) == sorted(chosen)
        assert len(whole) - 1 in chosen
        assert min(chosen) >= made.prefix_tokens
    if not isinstance(policy, DeepLayers):
        assert all(high <= low for low, high in itertools.pairwise(slots))

    # what is not computed at the bottom is read, and what is computed is computed in every layer
    for piece in made.pieces:
        span = set(range(piece.start, piece.stop))
        if piece.use == "compute":
            assert all(span - set(range(made.prefix_tokens)) <= chosen for chosen in slots)
        elif piece.use == "exact":
            assert piece.stop <= made.prefix_tokens
        else:
            assert piece.use == "reuse"
            assert policy.reuses_chunks
            assert piece.what != "text"
        if piece.exact and piece.use == "reuse":
            assert not any(span & chosen for chosen in slots)

    # exactness
    assert made.approximate == any(piece.use == "reuse" and not piece.exact for piece in made.pieces)
    assert all(piece.stop <= made.exact_tokens for piece in made.pieces if piece.use == "reuse" and piece.exact)
    if not policy.reuses_chunks:
        assert not made.approximate
    reused = {piece.start for piece in made.pieces if piece.use == "reuse"}
    for place, span in enumerate(whole.chunks):
        expected = span.start in reused and not held[place] and made.keys_rank is None
        assert (place in made.missing) == expected

    # printing
    lines = str(made).split("\n")
    assert len(lines) == 1 + len(made.pieces)
    assert f"{len(whole)} tokens = {count.exact} exact" in lines[0]


@pytest.fixture
def ll(opened: Callable[..., Looseleaf]) -> Looseleaf:
    return opened("qwen2_5_vl")


def until_a_block_is_one_short(ll: Looseleaf, before: Sequence[Any]) -> list[Any]:
    """A prompt whose length leaves one token of its last block free for the answer."""
    for extra in range(64):
        asked = [*before, "Go" + " on" * extra]
        if len(ll.builder.build(asked)) % 32 == 31:
            return asked
    raise AssertionError("no such prompt")


def test_the_next_turn_reads_the_rows_of_the_answer_as_well(ll: Looseleaf) -> None:
    asked = until_a_block_is_one_short(ll, ["Tell me more."])
    answer = ll.ask(asked, max_tokens=2, ignore_eos=True)
    said = ll.adapter.tokenizer.decode(answer.token_ids[:1])
    turns = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "And?"},
    ]
    size = len(ll.builder.build(asked))
    assert ll.builder.build(turns).ids[size] == answer.token_ids[0]
    ll.step()  # an answer is out before its rows are stored; wait until they are
    assert ll.plan(turns).prefix_tokens == size + 1


def test_an_answer_behind_a_clip_is_not_taken_for_the_same_words_as_text(ll: Looseleaf) -> None:
    """Answers start behind the clip's reach (66 here), text behind its advance (57): other positions, other rows."""
    frames = [Image(PILImages.new("RGB", (56, 56), (9 * number, 0, 0))) for number in range(20)]
    asked = until_a_block_is_one_short(ll, [Clip(frames, seconds_per_frame=0.5)])
    first = ll.builder.build(asked)
    said = ll.adapter.tokenizer("yes", add_special_tokens=False)["input_ids"][:1]
    turns = [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": ll.adapter.tokenizer.decode(said)},
        {"role": "user", "content": "And?"},
    ]
    later = ll.builder.build(turns)
    size = len(first)
    assert later.ids[: size + 1] == first.ids + tuple(said)
    assert int(later.positions[0, size]) < first.next_pos
    harvested = list(ll.linker.keys.blocks(first, tuple(said)))
    assert list(ll.linker.keys.blocks(later))[: len(harvested)] != harvested
