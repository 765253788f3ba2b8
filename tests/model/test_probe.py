"""What would be silently wrong is refused by name, and what can be served is found out, not assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    Qwen2Config,
)  # fmt: skip

from looseleaf.errors import UnsupportedModelError
from looseleaf.kv.attention import Packing, Share, attend, refuse_other_masks
from looseleaf.kv.layout import KVRows
from looseleaf.kv.table import SlotTable
from looseleaf.model.probe import build_decoder, check_config
from looseleaf.model.rotary import PairOrder

SMALL: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GQA = {**SMALL, "num_key_value_heads": 2}
MLA = {**SMALL, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
       "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
       "n_group": 1, "topk_group": 1}  # fmt: skip

PARTIAL = {**GQA, "head_dim": 16, "partial_rotary_factor": 0.5, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}  # fmt: skip


def make(build: Callable[[], Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = build().eval().to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(3)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("build", "order", "shows"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**GQA)), PairOrder.HALVES, True),
        (lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**MLA)), PairOrder.PAIRS_TO_HALVES, True),
        (lambda: DeepseekV2ForCausalLM(DeepseekV2Config(**MLA)), PairOrder.PAIRS, True),
        (lambda: Phi3ForCausalLM(Phi3Config(**GQA)), PairOrder.HALVES, False),
        (lambda: Phi3ForCausalLM(Phi3Config(**GQA, partial_rotary_factor=0.5)), PairOrder.HALVES, False),
        (lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**PARTIAL)), PairOrder.HALVES, True),
        (lambda: GlmForCausalLM(GlmConfig(**GQA, head_dim=16)), PairOrder.PAIRS, True),
    ],
    ids=["llama", "deepseek-v3", "deepseek-v2", "phi3-fused-qkv", "phi3-partial", "glm4-moe-partial", "glm-pairs"],
)
def test_the_rotary_form_is_found_by_comparing_keys(build: Any, order: PairOrder, shows: bool, dtype: Any) -> None:
    decoder = build_decoder(make(build, dtype))
    assert decoder.form.order is order
    assert decoder.shows_keys is shows


def test_partial_rotary_turns_only_the_leading_numbers() -> None:
    decoder = build_decoder(make(lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**PARTIAL))))
    assert decoder.form.dim == decoder.layout.layers[0].keys.dim // 2


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: MambaForCausalLM(MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2)), "MambaForCausalLM"),
        (lambda: Gemma2ForCausalLM(Gemma2Config(**GQA, head_dim=16)), "mask"),
        (lambda: GraniteForCausalLM(GraniteConfig(**GQA, embedding_multiplier=2.0)), "own forward"),
    ],
    ids=["state-space", "window-mask", "scaled-embeddings"],
)
def test_what_reuse_would_get_wrong_is_refused(build: Any, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        build_decoder(make(build))


def test_a_window_is_refused_unless_it_covers_what_is_served() -> None:
    config = Qwen2Config(use_sliding_window=True, sliding_window=512, max_window_layers=0, num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match=r"sliding_attention.*512.*max_length=512"):
        check_config(config, 4096)
    check_config(config, 512)


def test_linear_attention_layers_are_refused_by_their_name() -> None:
    config = Qwen2Config(num_hidden_layers=2)
    config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(UnsupportedModelError, match="linear_attention"):
        check_config(config, 128)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_batch_are_refused_beyond_their_fixed_range(kind: str) -> None:
    config = PhiConfig()
    config.rope_parameters = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 1024}
    with pytest.raises(UnsupportedModelError, match=f"{kind}.*1024"):
        check_config(config, 4096)
    check_config(config, 1024)


def test_a_mask_that_is_not_causal_is_refused_by_its_name() -> None:
    def sees_everything(*_: int) -> bool:
        return True

    with pytest.raises(UnsupportedModelError, match="sees_everything"):
        refuse_other_masks(mask_function=sees_everything)
    with pytest.raises(UnsupportedModelError, match="padding"):
        refuse_other_masks(attention_mask=torch.tensor([[0, 1]]))
    refuse_other_masks()


@pytest.mark.parametrize("argument", [{"softcap": 30.0}, {"s_aux": torch.ones(4)}, {"sliding_window": 2}])
def test_attention_arguments_we_do_not_implement_are_refused(argument: dict[str, Any]) -> None:
    decoder = build_decoder(make(lambda: LlamaForCausalLM(LlamaConfig(**GQA))))
    table = SlotTable(KVRows(decoder.layout, 4))
    packing = Packing([Share(table=table, start=0, stop=4, slots=[0, 1, 2, 3])], decoder.layout)
    query = torch.randn(1, 4, 4, 16)
    with pytest.raises(UnsupportedModelError, match=next(iter(argument)).split("_")[0]):
        attend(decoder.parts.layers[0].self_attn, query, query, query, None, scaling=1.0, looseleaf=packing, **argument)


def test_a_model_that_drops_our_batch_description_is_refused() -> None:
    decoder = build_decoder(make(lambda: LlamaForCausalLM(LlamaConfig(**GQA))))
    query = torch.randn(1, 4, 1, 16)
    with pytest.raises(UnsupportedModelError, match="batch description"):
        attend(decoder.parts.layers[0].self_attn, query, query, query, None, scaling=1.0)
