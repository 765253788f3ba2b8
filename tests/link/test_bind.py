"""Binding by one kernel comes to the same as layer by layer. Needs Triton: a GPU, or TRITON_INTERPRET=1."""

from __future__ import annotations

import os

import pytest
import torch

from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.link import fused
from looseleaf.link.bind import _by_layer
from looseleaf.link.bound import Bound
from looseleaf.model.rotary import PairOrder, Phase, RotaryForm
from looseleaf.patch.form import cut, form_patch

LAYERS = 3
GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        fused.triton is None or not (GPU or os.environ.get("TRITON_INTERPRET") == "1"), reason="no Triton to run"
    ),
]


def rows(layout: KVLayout, tokens: int, seed: int, device: str) -> KVRows:
    made, chance = KVRows(layout, tokens, device), torch.Generator().manual_seed(seed)
    for one in (*made.keys, *made.values):
        one.copy_(torch.randn(one.shape, generator=chance))
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", list(PairOrder))
@pytest.mark.parametrize(
    ("keys", "values", "turned"),
    [
        (Plane(heads=2, dim=64), Plane(heads=2, dim=64), 64),
        (Plane(heads=4, dim=40), Plane(heads=4, dim=40), 16),  # partial rotary, no power of two
        (Plane(heads=1, dim=16), Plane(heads=1, dim=96), 16),  # MLA: a rope band and a latent
    ],
)
def test_one_kernel_is_as_layer_by_layer(
    dtype: torch.dtype, order: PairOrder, keys: Plane, values: Plane, turned: int
) -> None:
    device = "cuda" if GPU else "cpu"
    if dtype is torch.bfloat16 and not GPU:
        pytest.skip("the interpreter multiplies bf16 as whole numbers")
    layout = KVLayout(layers=(LayerLayout(keys=keys, values=values),) * LAYERS, dtype=dtype)
    sizes = (70, 5, 33)
    stored = [rows(layout, tokens + 8, seed, device).part(8, tokens + 8) for seed, tokens in enumerate(sizes)]
    patch = form_patch(rows(layout, 70, 9, device), stored[0], share=0.9)  # more directions than are added at a time
    deep = cut(form_patch(rows(layout, 33, 8, device), stored[2], share=0.5), share=0.2, from_layer=2)
    bound = [
        Bound(slots=slice(3, 73), rows=stored[0], patch=patch),
        Bound(slots=slice(73, 78), rows=stored[1], patch=None),
        Bound(slots=slice(80, 113), rows=stored[2], patch=deep),
    ]
    angle = torch.rand(sum(sizes), turned // 2, device=device) * 6
    precise = torch.float32 if order is PairOrder.PAIRS else dtype
    phase = Phase(cos=angle.cos().to(precise), sin=angle.sin().to(precise))
    form = RotaryForm(order=order, dim=turned)
    expected, got = (rows(layout, 128, 5, device) for _ in range(2))
    assert fused.is_regular(got, bound)
    bind = _by_layer(expected, bound, phase, form)
    for layer in range(LAYERS):
        bind(layer)
    fused.bind(got, bound, phase, form)
    allowed = 1e-5 if dtype is torch.float32 else 0.06
    for one, other in zip((*got.keys, *got.values), (*expected.keys, *expected.values), strict=True):
        assert torch.equal(one[:, 73:80], other[:, 73:80]), "without a patch to the last bit"
        torch.testing.assert_close(one, other, atol=allowed, rtol=allowed)
    for layer in range(2):
        assert torch.equal(got.keys[layer][:, 80:113], expected.keys[layer][:, 80:113]), "a layer that is not patched"


def test_rows_and_factors_that_lie_otherwise_are_left_to_the_other_way() -> None:
    plane = Plane(heads=2, dim=64)
    layout = KVLayout(layers=(LayerLayout(keys=plane, values=plane),) * LAYERS, dtype=torch.float32)
    stored = rows(layout, 8, 0, "cpu")
    turned = KVRows.of_views(layout, [one.mT.contiguous().mT for one in stored.keys], stored.values)
    whole = rows(layout, 16, 1, "cpu")
    assert fused.is_regular(whole, [Bound(slots=slice(0, 8), rows=whole.part(2, 10), patch=None)])
    assert not fused.is_regular(whole, [Bound(slots=slice(0, 8), rows=turned, patch=None)])
    assert not fused.can_bind(whole, [Bound(slots=slice(0, 8), rows=stored, patch=None)]), "not on a GPU"
