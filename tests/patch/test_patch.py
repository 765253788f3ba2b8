"""Factors, patches, orbit patches and shared bases as matrices: what must hold whatever the model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.kv.records import Factors, Patch
from looseleaf.patch.basis import learn_basis, patch_in
from looseleaf.patch.deficit import find_deficit
from looseleaf.patch.form import cut, factor, form_patch, put_on, rank_within
from looseleaf.patch.orbit import merge

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


@given(st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.999))
@settings(max_examples=100, deadline=None)
def test_a_rank_stays_within_its_share_of_the_bytes(tokens: int, width: int, share: float) -> None:
    rank = rank_within(share, tokens, width)
    assert 1 <= rank <= min(tokens, width)
    if rank > 1:
        assert rank * (tokens + width) <= share * tokens * width + 1e-6
    more = rank + 1
    assert more > min(tokens, width) or more * (tokens + width) > share * tokens * width


@pytest.mark.parametrize("shape", [(30, 12), (12, 30)])
def test_factors_are_the_best_of_their_rank(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    for rank in (1, 5, 12):
        found = factor(matrix, rank)
        sizes = found.left.norm(dim=0)
        assert (sizes[:-1] >= sizes[1:] - 1e-5).all(), "the largest first: patches are cut from larger ones"
        torch.testing.assert_close(found.right.mT @ found.right, torch.eye(rank), atol=1e-5, rtol=0)
        left = (matrix - found.left @ found.right.mT).square().sum()
        assert left == pytest.approx(float(torch.linalg.svdvals(matrix)[rank:].square().sum()), abs=1e-4)
        assert found.rank == rank


def test_a_deficit_of_few_tokens_is_factored() -> None:
    """In bf16 most tokens of a shallow layer have no deficit: single precision may not converge on such a matrix."""
    for seed in range(20):
        matrix = torch.zeros(65, 192)
        chance = torch.Generator().manual_seed(seed)
        few = torch.randperm(65, generator=chance)[: 3 + seed % 3]
        matrix[few] = (0.01 * torch.randn(len(few), 192, generator=chance)).bfloat16().float()
        found = factor(matrix, 12)
        assert (found.left @ found.right.mT - matrix).abs().max() < 1e-5


@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-7, 1e-5, 1e5])
@pytest.mark.parametrize("rank", [3, 12, 192])
def test_factors_are_numbers_whatever_the_size(size: float, rank: int) -> None:
    """An image that stands where it was computed has a deficit of rounding alone: few entries, all tiny."""
    chance = torch.Generator().manual_seed(4)
    sparse = torch.zeros(258, 192)
    rows, columns = (torch.randint(limit, (850,), generator=chance) for limit in sparse.shape)
    sparse[rows, columns] = size * torch.randn(850, generator=chance)
    found = factor(sparse, rank)
    assert found.left.isfinite().all()
    assert found.right.isfinite().all()
    assert (found.left @ found.right.mT - sparse).norm() <= 1.001 * sparse.norm()
    if rank == 192:
        assert (found.left @ found.right.mT - sparse).abs().max() <= 1e-5 * size


def test_what_is_not_finite_has_no_factors() -> None:
    with pytest.raises(ValueError, match="not finite"):
        factor(torch.full((8, 8), torch.inf), 2)


def test_a_randomised_decomposition_is_nearly_as_good() -> None:
    chance = torch.Generator().manual_seed(2)
    low = torch.randn(400, 6, generator=chance) @ torch.randn(6, 300, generator=chance)
    matrix = low + 0.05 * torch.randn(400, 300, generator=chance)
    found = factor(matrix, 6)
    assert torch.equal(found.left, factor(matrix, 6).left)
    left = (matrix - found.left @ found.right.mT).square().sum()
    assert left <= 1.02 * torch.linalg.svdvals(matrix)[6:].square().sum()


def test_a_patch_of_every_direction_restores_the_rows() -> None:
    alone, conditioned = rows(1), rows(2)
    patch = form_patch(conditioned, alone, share=1.0)
    assert patch.keys[0] is None, "the first layer has no deficit"
    for layer in range(1, LAYERS):
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
    assert patch.nbytes == form_patch(rows(2), alone, share=0.5).nbytes / 2


def test_nothing_to_restore_restores_nothing() -> None:
    alone = rows(1)
    patch = form_patch(rows(1), alone, share=0.3)
    keys, _ = both(patch, 1, alone)
    torch.testing.assert_close(keys, alone.keys[1])


def test_a_patch_has_the_dtype_of_its_page() -> None:
    patch = form_patch(rows(2, dtype=torch.bfloat16), rows(1, dtype=torch.bfloat16), share=0.3)
    assert {one.left.dtype for one in patch.keys if one} == {torch.bfloat16}


def test_the_deficit_is_what_context_adds() -> None:
    conditioned, alone = rows(2), rows(1)
    found = find_deficit(conditioned, alone)
    plane = (conditioned.keys[0] - alone.keys[0]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.keys[0], plane)
    assert found.value_energy[1] == pytest.approx(float(conditioned.values[1].square().sum()), rel=1e-5)


def test_a_cut_patch_is_the_one_formed_with_fewer_bytes() -> None:
    conditioned, alone = rows(2), rows(1)
    whole = form_patch(conditioned, alone, share=1.0)
    short = cut(whole, share=0.4)
    assert short.nbytes == form_patch(conditioned, alone, share=0.4).nbytes
    formed = form_patch(conditioned, alone, share=0.4)
    for mine, theirs in zip(both(short, 1, alone), both(formed, 1, alone), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    assert cut(whole, share=0.4, from_layer=2).keys[1] is None


def dense(patch: Patch) -> list[torch.Tensor]:
    return [one.left @ one.right.mT for one in (*patch.keys, *patch.values) if isinstance(one, Factors)]


def test_merging_is_the_mean_of_what_patches_add() -> None:
    alone = rows(0)
    patches = [form_patch(rows(seed), alone, share=1.0) for seed in (1, 2, 3)]
    merged = merge(merge(patches[0], 1, patches[1], 1), 2, patches[2], 1)
    for got, *each in zip(dense(merged), *map(dense, patches), strict=True):
        torch.testing.assert_close(got, torch.stack(each).mean(0), atol=1e-4, rtol=1e-4)


def test_merging_keeps_a_patch_at_its_size() -> None:
    alone = rows(0)
    one, other = (form_patch(rows(seed), alone, share=0.3) for seed in (1, 2))
    merged = merge(one, 5, other, 1)
    assert merged.nbytes == one.nbytes
    best = [(5 * a + b) / 6 for a, b in zip(dense(one), dense(other), strict=True)]
    for got, mean, factors in zip(dense(merged), best, (*merged.keys[1:], *merged.values[1:]), strict=True):
        assert factors is not None
        left = float((got - mean).square().sum())
        assert left == pytest.approx(float(torch.linalg.svdvals(mean)[factors.rank :].square().sum()), abs=1e-3)


def test_deep_only_patches_merge_where_both_have_a_layer() -> None:
    alone = rows(0)
    deep = form_patch(rows(1), alone, share=0.3, from_layer=LAYERS - 1)
    assert [one is None for one in merge(deep, 1, deep, 1).keys] == [True] * (LAYERS - 1) + [False]


def test_a_whole_basis_restores_the_rows_and_is_counted_once() -> None:
    alone = rows(0)
    deficits = [find_deficit(rows(seed), alone) for seed in (1, 2)]
    basis = learn_basis(deficits)
    patch = patch_in(basis, deficits[0], alone, share=1.0)
    for got, delta in zip(dense(patch), (*deficits[0].keys[1:], *deficits[0].values[1:]), strict=True):
        torch.testing.assert_close(got, delta, atol=1e-4, rtol=1e-4)
    small = patch_in(basis, deficits[0], alone, share=0.25)
    assert small.nbytes <= 0.25 * alone.nbytes
    assert basis.nbytes > 0


def test_a_basis_of_items_alike_serves_another_of_them() -> None:
    chance = torch.Generator().manual_seed(5)
    directions = [torch.randn(16, 2, generator=chance), torch.randn(20, 2, generator=chance)]

    def item(seed: int) -> tuple[object, object]:
        alone, conditioned, own = rows(seed), rows(seed), torch.Generator().manual_seed(seed)
        for planes, right in ((conditioned.keys, directions[0]), (conditioned.values, directions[1])):
            for plane in planes:
                heads, tokens, dim = plane.shape
                delta = torch.randn(tokens, 2, generator=own) @ right.mT
                plane += delta.view(tokens, heads, dim).transpose(0, 1)
        return find_deficit(conditioned, alone), alone

    basis = learn_basis(item(seed)[0] for seed in range(4))  # type: ignore[misc]
    deficit, alone = item(9)
    patch = patch_in(basis, deficit, alone, share=0.13)  # type: ignore[arg-type]
    for got, delta in zip(dense(patch), (*deficit.keys[1:], *deficit.values[1:]), strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(got, delta, atol=1e-3, rtol=1e-3)


def test_no_deficits_make_no_basis() -> None:
    with pytest.raises(ValueError, match="at least one"):
        learn_basis([])
