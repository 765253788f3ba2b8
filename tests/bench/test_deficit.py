"""The shape of a deficit: what must hold whatever the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from looseleaf import Looseleaf
from looseleaf.bench import deficit
from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.patch.deficit import find_deficit
from looseleaf.prompt.segments import Document, Segment

LAYERS, HEADS, TOKENS, DIM = 3, 2, 40, 8


def rows(seed: int) -> KVRows:
    plane = Plane(heads=HEADS, dim=DIM)
    layout = KVLayout(layers=(LayerLayout(keys=plane, values=plane),) * LAYERS, dtype=torch.float32)
    made, chance = KVRows(layout, TOKENS), torch.Generator().manual_seed(seed)
    for one in (*made.keys, *made.values):
        one.copy_(torch.randn(one.shape, generator=chance))
    return made


def moved(blind: KVRows, delta: torch.Tensor) -> KVRows:
    """The same rows with delta [token, head · dim] added to keys and values of every layer."""
    heads = delta.view(TOKENS, HEADS, DIM).transpose(0, 1)
    return KVRows.of_views(blind.layout, [one + heads for one in blind.keys], [one + heads for one in blind.values])


def look(conditioned: KVRows, alone: KVRows) -> deficit.Look:
    """Rows in context and alone, with attention spread evenly."""
    even = torch.ones(TOKENS)
    return deficit.Look(conditioned=conditioned, alone=alone, elsewhere=alone, mass=even, links=even)


def test_equal_rows_have_no_deficit() -> None:
    found = deficit.describe(look(rows(0), rows(0)))
    assert found["keys_by_layer"] == found["values_by_layer"] == [0.0] * LAYERS
    assert found["tokens_50"] == found["tokens_90"] == 0
    assert "keys_rank_90" not in found
    assert found["position_by_layer"] == [0.0] * LAYERS
    assert found["links_90"] == pytest.approx(0.9 * TOKENS)


def test_heads_and_tiles_show_where_it_lies() -> None:
    delta = torch.zeros(TOKENS, HEADS * DIM)
    delta[: TOKENS // 2, :DIM] = 1.0
    found = deficit.describe(look(moved(rows(0), delta), rows(0)))
    assert found["energy_by_heads"] == [1.0, 1.0], "one head has all of it"
    layer = torch.tensor(found["map"][1])
    tokens, features = deficit.TILES
    assert bool((layer[: tokens // 2, : features // 2] > 0).all())
    assert not layer[tokens // 2 + 1 :].any()
    assert not layer[:, features // 2 :].any()
    assert found["chosen_by_oracle"] == pytest.approx(0.5, abs=0.05)


def test_rows_against_nothing_are_all_deficit() -> None:
    blind = rows(0)
    nothing = KVRows.of_views(blind.layout, [0 * one for one in blind.keys], [0 * one for one in blind.values])
    found = find_deficit(blind, nothing)
    assert deficit.relative_by_layer(found.keys, found.key_energy) == pytest.approx([1.0] * LAYERS)


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_a_deficit_of_rank_r_is_found_to_have_rank_r(rank: int) -> None:
    chance = torch.Generator().manual_seed(rank)
    left, _ = torch.linalg.qr(torch.randn(TOKENS, rank, generator=chance))
    right, _ = torch.linalg.qr(torch.randn(HEADS * DIM, rank, generator=chance))
    found = find_deficit(moved(rows(0), 9 * left @ right.T), rows(0))
    for delta in (*found.keys, *found.values):
        energy = deficit.direction_energy(delta)
        assert deficit.needed(energy, 0.99) == rank
        assert deficit.needed(energy, 0.5) == -(-rank // 2), "its directions are equally strong"


def test_an_oracle_needs_the_tokens_that_differ_and_no_more() -> None:
    delta = torch.zeros(TOKENS, HEADS * DIM)
    delta[[3, 5, 8, 30]] = 1.0
    energy = deficit.token_energy(find_deficit(moved(rows(0), delta), rows(0)))
    assert deficit.needed(energy, 0.9999) == 4
    assert deficit.needed(energy, 0.5) == 2


def test_all_tokens_carry_everything_and_more_tokens_never_less() -> None:
    energy = deficit.token_energy(find_deficit(rows(1), rows(0)))
    curve = deficit.carried(energy)
    assert float(curve[-1]) == 1.0
    assert bool((curve.diff() >= 0).all())
    assert deficit.needed(energy, 1.0) == TOKENS


def test_an_even_score_is_even_by_position_and_a_front_is_seen() -> None:
    assert deficit.by_position(torch.ones(TOKENS)) == pytest.approx([1.0] * deficit.PARTS)
    assert deficit.first_share(torch.ones(TOKENS)) == pytest.approx(0.25)
    front = torch.zeros(TOKENS)
    front[0] = 1.0
    parts = deficit.by_position(front)
    assert parts[0] == max(parts) > 1
    assert deficit.first_share(front) == 1.0


def test_the_distance_of_keys_is_where_keys_differ() -> None:
    delta = torch.zeros(TOKENS, HEADS * DIM)
    delta[7] = 2.0
    distance = deficit.key_distance(moved(rows(0), delta), rows(0))
    assert int(distance.argmax()) == 7
    assert distance[:7].abs().max() == distance[8:].abs().max() == 0


def prompt_of(ll: Looseleaf) -> list[Segment]:
    """Two pages; the first stands right behind the canonical context."""
    pages: list[Segment] = [Document("The star is red. The ring is blue."), Document("The star comes first, then it.")]
    ll.warm(pages)
    return [*pages, "Which one?"]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "kimi_k25"])
def test_a_chunk_that_stands_at_home_has_no_deficit_and_the_next_one_has(
    opened: Callable[..., Looseleaf], family: str
) -> None:
    ll = opened(family)
    prompt = ll.builder.build(prompt_of(ll))
    pages = prompt_of(ll)[:2]
    first, second = (deficit.measure(ll, prompt, *pair) for pair in zip(prompt.chunks, pages, strict=True))
    assert max(first["keys_by_layer"] + first["values_by_layer"]) < 1e-4
    assert second["keys_by_layer"][0] < 1e-4, "layer 0 sees no other token before its keys are made"
    assert second["keys_by_layer"][-1] > 0.01
    assert second["tokens"] == len(prompt.chunks[1])
    assert 0 < second["tokens_50"] <= second["tokens_90"] <= 1
    assert second["position_by_layer"][0] < 1e-4 < max(second["position_by_layer"]), "the preamble is seen from afar"
    assert second["content_by_layer"] == second["values_by_layer" if family == "kimi_k25" else "keys_by_layer"]
    assert 0 < second["links_90"] <= second["links"] == prompt.chunks[1].start
    assert 0 < second["chosen_by_layer"][-1] <= second["chosen_by_oracle"] + 1e-9
    assert ("energy_by_heads" in second) == (family != "kimi_k25")


def test_attention_of_later_tokens_stays_below_one_a_row(opened: Callable[..., Looseleaf]) -> None:
    ll = opened()
    prompt = ll.builder.build(prompt_of(ll))
    span = prompt.chunks[0]
    _, mass = deficit.in_context(ll, prompt, span)
    layers, heads = len(ll.adapter.layout.layers), ll.adapter.model.config.get_text_config().num_attention_heads
    assert len(mass) == len(span)
    assert bool((mass > 0).all())
    assert float(mass.sum()) < layers * heads * (len(prompt) - span.stop)


def test_averages_keep_curves_and_numbers_and_a_figure_is_drawn(tmp_path: Path) -> None:
    shapes = [deficit.describe(look(rows(seed), rows(9))) for seed in (1, 2)]
    mean = deficit.average(shapes)
    assert mean["chunks"] == 2
    assert mean["tokens"] == TOKENS
    assert len(mean["keys_by_layer"]) == LAYERS
    assert np.shape(mean["map"]) == (LAYERS, *deficit.TILES)
    deficit.plot({"a model": {"a task": mean}}, tmp_path / "deficit.png")
    assert (tmp_path / "deficit.png").stat().st_size > 1000
