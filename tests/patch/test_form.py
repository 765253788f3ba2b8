"""Factors and patches as matrices: what must hold whatever the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.kv.records import Patch
from looseleaf.patch.deficit import find_deficit
from looseleaf.patch.form import factor, form_patch, put_on, rank_within

LAYERS, TOKENS = 3, 24


def rows(seed: int, *, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> KVRows:
    """Random rows of a layout whose keys and values differ in shape, as MLA's do."""
    layer = LayerLayout(keys=Plane(heads=2, dim=8), values=Plane(heads=1, dim=20))
    made = KVRows(KVLayout(layers=(layer,) * LAYERS, dtype=dtype), tokens)
    chance = torch.Generator().manual_seed(seed)
    for one in (*made.keys, *made.values):
        one.copy_(torch.randn(one.shape, generator=chance))
    return made


def both(patch: Patch, layer: int, alone: KVRows) -> list[torch.Tensor]:
    """Keys and values of a layer with the patch put on, into memory that is a part of something larger."""
    planes = ((alone.keys[layer], patch.keys[layer]), (alone.values[layer], patch.values[layer]))
    found = []
    for plane, factors in planes:
        assert factors is not None
        heads, tokens, dim = plane.shape
        room = torch.full((heads, tokens + 5, dim), torch.nan, dtype=plane.dtype)[:, 2 : tokens + 2]
        assert torch.equal(put_on(factors, plane, out=room), put_on(factors, plane))
        found.append(room)
    return found


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_a_rank_stays_within_its_share_of_the_bytes(tokens: int, width: int, share: float) -> None:
    rank = rank_within(share, tokens, width)
    assert 1 <= rank <= min(tokens, width)
    if rank > 1:
        assert rank * (tokens + width) <= share * tokens * width + 1e-6
    more = rank + 1
    assert more > min(tokens, width) or more * (tokens + width) > share * tokens * width


def test_factors_are_the_best_of_their_rank() -> None:
    matrix = torch.randn(30, 12, generator=torch.Generator().manual_seed(1))
    for rank in (1, 5, 12):
        found = factor(matrix, rank)
        left = (matrix - found.left @ found.right.mT).square().sum()
        assert left == pytest.approx(float(torch.linalg.svdvals(matrix)[rank:].square().sum()), abs=1e-4)
        assert found.rank == rank


def test_a_randomised_decomposition_is_nearly_as_good() -> None:
    chance = torch.Generator().manual_seed(2)
    low = torch.randn(400, 6, generator=chance) @ torch.randn(6, 300, generator=chance)
    matrix = low + 0.05 * torch.randn(400, 300, generator=chance)
    found = factor(matrix, 6)
    left = (matrix - found.left @ found.right.mT).square().sum()
    assert left <= 1.02 * torch.linalg.svdvals(matrix)[6:].square().sum()


def test_a_patch_of_every_direction_restores_the_rows() -> None:
    alone, conditioned = rows(1), rows(2)
    patch = form_patch(conditioned, alone, share=1.0)
    for layer in range(LAYERS):
        keys, values = both(patch, layer, alone)
        torch.testing.assert_close(keys, conditioned.keys[layer], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, conditioned.values[layer], atol=1e-5, rtol=1e-5)


def test_a_patch_of_a_low_rank_deficit_restores_the_rows_for_few_bytes() -> None:
    alone, chance = rows(1, tokens=60), torch.Generator().manual_seed(3)
    conditioned = rows(1, tokens=60)
    for plane in (*conditioned.keys, *conditioned.values):
        heads, tokens, dim = plane.shape
        delta = torch.randn(tokens, 2, generator=chance) @ torch.randn(2, heads * dim, generator=chance)
        plane += delta.view(tokens, heads, dim).transpose(0, 1)
    patch = form_patch(conditioned, alone, share=0.2)
    assert patch.nbytes <= 0.2 * alone.nbytes
    keys, values = both(patch, 1, alone)
    torch.testing.assert_close(keys, conditioned.keys[1], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values, conditioned.values[1], atol=1e-4, rtol=1e-4)


def test_shallow_layers_are_left_alone() -> None:
    alone = rows(1)
    patch = form_patch(rows(2), alone, share=0.5, from_layer=2)
    for planes in (patch.keys, patch.values):
        assert [one is None for one in planes] == [True, True, False]
    assert patch.nbytes < form_patch(rows(2), alone, share=0.5).nbytes / 2


def test_nothing_to_restore_restores_nothing() -> None:
    alone = rows(1)
    patch = form_patch(rows(1), alone, share=0.3)
    keys, _ = both(patch, 0, alone)
    torch.testing.assert_close(keys, alone.keys[0])


def test_a_patch_has_the_dtype_of_its_page() -> None:
    patch = form_patch(rows(2, dtype=torch.bfloat16), rows(1, dtype=torch.bfloat16), share=0.3)
    assert {one.left.dtype for one in patch.keys if one is not None} == {torch.bfloat16}


def test_the_deficit_is_what_context_adds() -> None:
    conditioned, alone = rows(2), rows(1)
    found = find_deficit(conditioned, alone)
    plane = (conditioned.keys[0] - alone.keys[0]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.keys[0], plane)
    assert found.value_energy[1] == pytest.approx(float(conditioned.values[1].square().sum()), rel=1e-5)
