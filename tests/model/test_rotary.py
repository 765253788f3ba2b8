"""Rotary algebra against the models' own, for every scaling and pair order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from looseleaf import Looseleaf
from looseleaf.bench import exact
from looseleaf.model.loading import load_adapter
from looseleaf.model.rotary import PairOrder, Phase, RotaryForm, rotate, unrotate
from looseleaf.model.tiny import build_tiny

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "attention_factor": 1.2},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 4096},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_vl"])
def test_scaled_rotaries_relocate_exactly_and_apply_their_factor_once(
    family: str, scaling: str, tmp_path: Path
) -> None:
    path = build_tiny(family, tmp_path, overrides={"text_config.rope_parameters": SCALINGS[scaling]})
    with Looseleaf(load_adapter(path)) as ll:
        prompt = exact.make_prompts(ll, seed=1, count=1)[0]
        assert exact.mask_oracle_error(ll, prompt) <= exact.TOLERANCE
        assert exact.relocate_ulp(ll, prompt, 1000) == 0
        if scaling == "yarn":
            assert exact.yarn_control(ll, seed=1)


@pytest.mark.parametrize("order", PairOrder)
@pytest.mark.parametrize("dim", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turning_back_undoes_turning(order: PairOrder, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = torch.randn(3, 7, 32).to(dtype)
    angles = torch.randn(7, dim // 2)
    wide = torch.float32 if order is PairOrder.PAIRS else dtype
    phase = Phase(cos=(1.2 * angles.cos()).to(wide), sin=(1.2 * angles.sin()).to(wide))
    form = RotaryForm(order=order, dim=dim)
    back = unrotate(rotate(keys, phase, form), phase, form)
    allowed = 2 * torch.finfo(dtype).eps * keys.float().norm(dim=-1, keepdim=True)
    assert ((back - keys).abs().float() <= allowed).all()


@pytest.mark.parametrize("order", PairOrder)
def test_two_turns_are_one_turn_by_the_sum(order: PairOrder) -> None:
    keys = torch.randn(2, 5, 16, dtype=torch.float64)
    angles, form = torch.randn(5, 8, dtype=torch.float64), RotaryForm(order=order, dim=16)
    once = rotate(keys, Phase(cos=(2 * angles).cos(), sin=(2 * angles).sin()), form)
    phase = Phase(cos=angles.cos(), sin=angles.sin())
    again = RotaryForm(order=PairOrder.HALVES if order is PairOrder.PAIRS_TO_HALVES else order, dim=16)
    torch.testing.assert_close(rotate(rotate(keys, phase, form), phase, again), once, atol=1e-6, rtol=1e-6)


def test_positions_decide_nothing_but_the_phase(adapter_of: Any) -> None:
    """Moving all axes by one number turns a key the same way whatever its own height and width."""
    decoder = adapter_of("qwen2_5_vl").decoder
    near, far = torch.tensor([[3], [5], [7]]), torch.tensor([[103], [105], [107]])
    step = decoder.phase(torch.full((3, 1), 100))
    moved = rotate(rotate(torch.ones(1, 1, 32), decoder.phase(near), decoder.form), step, decoder.form)
    torch.testing.assert_close(moved, rotate(torch.ones(1, 1, 32), decoder.phase(far), decoder.form), atol=1e-4, rtol=0)
