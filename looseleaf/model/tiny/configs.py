"""The model configs of the tiny families: what each is known for, at a width that builds in a moment.

Text towers are 4 layers of width 96 or 128, vision towers 2 or 3 layers of width 64. Kept from the released models:
grouped, full or latent attention, blocked or interleaved M-RoPE, deepstack, experts, tiles. Each function takes the
family's tokenizer, for the vocabulary's size and the ids of its markers, and returns the nested keyword arguments of
the family's config class. What this file does not know: image processors, chat templates, weights.
"""

from typing import Any

Config = dict[str, Any]

MAX_POSITION = 262_144
"""Room to shift a prompt by 100,000 positions."""


def _text(tokenizer: Any, **changes: Any) -> Config:
    common: Config = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITION,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    return common | changes


def _mrope(sections: list[int], *, theta: float, **more: Any) -> Config:
    return {"rope_type": "default", "rope_theta": theta, "mrope_section": sections, **more}


def _id(tokenizer: Any, token: str) -> int:
    return int(tokenizer.convert_tokens_to_ids(token))


def _qwen_ids(tokenizer: Any) -> Config:
    return {
        "image_token_id": _id(tokenizer, "<|image_pad|>"),
        "video_token_id": _id(tokenizer, "<|video_pad|>"),
        "vision_start_token_id": _id(tokenizer, "<|vision_start|>"),
        "vision_end_token_id": _id(tokenizer, "<|vision_end|>"),
    }


def qwen2_vl(tokenizer: Any) -> Config:
    # With blocked sections the last axis has the slowest frequencies: a theta of 1,000 keeps it visible.
    vision = {"depth": 2, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2, "num_heads": 4}
    text = _text(tokenizer, rope_parameters=_mrope([4, 6, 6], theta=1_000.0))
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": True, **_qwen_ids(tokenizer)}


def qwen2_5_vl(tokenizer: Any) -> Config:
    vision: Config = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 128}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    text = _text(tokenizer, rope_parameters=_mrope([4, 6, 6], theta=1_000.0))
    return {"text_config": text, "vision_config": vision, **_qwen_ids(tokenizer)}


def _qwen3(tokenizer: Any, **changes: Any) -> Config:
    vision: Config = {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "out_hidden_size": 96}
    vision |= {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
    rope = _mrope([6, 5, 5], theta=10_000.0, mrope_interleaved=True)
    # As in the released models, heads times head_dim is not the hidden size.
    text = _text(tokenizer, hidden_size=96, head_dim=32, rope_parameters=rope, **changes)
    return {"text_config": text, "vision_config": vision, **_qwen_ids(tokenizer)}


def qwen3_vl(tokenizer: Any) -> Config:
    return _qwen3(tokenizer)


def qwen3_vl_moe(tokenizer: Any) -> Config:
    return _qwen3(tokenizer, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)


_TOWER: Config = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "patch_size": 14,
    "image_size": 42,
}
PINPOINTS_2 = [[42, 84], [84, 42], [84, 84], [126, 42], [42, 126]]
PINPOINTS_3 = [[42 * rows, 42 * columns] for rows in (1, 2, 3) for columns in (1, 2, 3)]


def _llava_next(tokenizer: Any, text: Config) -> Config:
    vision = _TOWER | {"model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 64}
    return {
        "text_config": text,
        "vision_config": vision,
        "image_token_index": _id(tokenizer, "<image>"),
        "image_grid_pinpoints": PINPOINTS_2,
        "image_seq_length": 9,
    }


def llava_next_vicuna(tokenizer: Any) -> Config:
    return _llava_next(tokenizer, _text(tokenizer, model_type="llama", num_key_value_heads=4))


def llava_next_mistral(tokenizer: Any) -> Config:
    return _llava_next(tokenizer, _text(tokenizer, model_type="mistral", sliding_window=None))


def llava_onevision(tokenizer: Any) -> Config:
    return {
        "text_config": _text(tokenizer, model_type="qwen2", tie_word_embeddings=True),
        "vision_config": _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "image_token_index": _id(tokenizer, "<image>"),
        "video_token_index": _id(tokenizer, "<video>"),
        "image_grid_pinpoints": PINPOINTS_3,
        "vision_aspect_ratio": "anyres_max_4",
        "tie_word_embeddings": True,
    }


def deepseek_vl(tokenizer: Any) -> Config:
    tower = _TOWER | {"model_type": "siglip_vision_model", "image_size": 96, "patch_size": 16, "vision_use_head": False}
    return {
        "text_config": _text(tokenizer, model_type="llama", num_key_value_heads=4),
        "vision_config": tower,
        "image_token_id": _id(tokenizer, "<image_placeholder>"),
        "tie_word_embeddings": False,
    }


def kimi_k25(tokenizer: Any) -> Config:
    rope = {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 64.0, "original_max_position_embeddings": 4096}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    latent = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    experts |= {"n_shared_experts": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 64}
    text = _text(tokenizer, model_type="deepseek_v3", num_key_value_heads=4, rope_parameters=rope, rope_interleave=True)
    text |= {"routed_scaling_factor": 2.827, "num_nextn_predict_layers": 0, **latent, **experts}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"pos_emb_height": 16, "pos_emb_width": 16}
    return {
        "text_config": text,
        "vision_config": vision,
        "projection_hidden_size": 64,
        "image_token_id": _id(tokenizer, "<|media_pad|>"),
        "video_token_id": _id(tokenizer, "<|kimi_k25_video_placeholder|>"),
        "vision_start_token_id": _id(tokenizer, "<|media_begin|>"),
        "vision_end_token_id": _id(tokenizer, "<|media_end|>"),
        "tie_word_embeddings": False,
    }


def internvl(tokenizer: Any) -> Config:
    return {
        "text_config": _text(tokenizer, model_type="qwen2"),
        "vision_config": _TOWER | {"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True},
        "image_token_id": _id(tokenizer, "<IMG_CONTEXT>"),
        "image_seq_length": 4,
        "tie_word_embeddings": True,
    }


def smolvlm(tokenizer: Any) -> Config:
    return {
        "text_config": _text(tokenizer, model_type="llama"),
        "vision_config": _TOWER | {"image_size": 64, "patch_size": 16},
        "image_token_id": _id(tokenizer, "<image>"),
        "scale_factor": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }


def text_only(tokenizer: Any) -> Config:
    return _text(tokenizer)
