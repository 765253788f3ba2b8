"""The thirteen tiny families as data: model config, vocabulary, image settings and chat template of each.

Images of 112 to 224 pixels become 16 to 70 tokens, and their size decides how many wherever the family's own does.
What this file does not know: how a folder is written.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from looseleaf.model.tiny import configs, templates
from looseleaf.model.tiny.configs import Config
from looseleaf.model.tiny.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What `build_tiny` needs. `config` takes the tokenizer, for the ids; text-only families have no processor."""

    model_type: str
    config: Callable[[Any], Config]
    vocabulary: Vocabulary
    template: str
    processor: Mapping[str, Any] = field(default_factory=dict)
    """processor_config.json, `processor_class` included."""
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    """preprocessor_config.json."""
    video_processor: Mapping[str, Any] = field(default_factory=dict)
    """video_preprocessor_config.json, read where torchvision is installed."""

    @property
    def sees_images(self) -> bool:
        return bool(self.image_processor)


_QWEN_MARKERS = ("<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_VOCABULARY = Vocabulary(style="qwen2", eos="<|im_end|>", pad="<|endoftext|>", special=_QWEN_MARKERS)
QWEN_VISUALS = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_QWEN_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 256}
_LLAVA_VOCABULARY = Vocabulary(style="llama", bos="<s>", eos="</s>", pad="<pad>", adds_bos=True, special=("<image>",))


def _qwen_vl(model_type: str, config: Callable[[Any], Config], processor: str, *, patch: int, video: str) -> Family:
    images = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": patch, "temporal_patch_size": 2}
    system = "You are a helpful assistant." if patch == 14 else ""
    return Family(
        model_type=model_type,
        config=config,
        vocabulary=_QWEN_VOCABULARY,
        template=templates.chatml(system=system, **QWEN_VISUALS),
        processor={"processor_class": processor},
        image_processor={**images, "merge_size": 2, "size": _QWEN_PIXELS},
        video_processor={"video_processor_type": video, "patch_size": patch, "merge_size": 2, "size": _QWEN_PIXELS},
    )


def _llava(config: Callable[[Any], Config], template: str) -> Family:
    images = {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": configs.PINPOINTS_2}
    strategy = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return Family(
        model_type="llava_next",
        config=config,
        vocabulary=_LLAVA_VOCABULARY,
        template=template,
        processor={"processor_class": "LlavaNextProcessor", "patch_size": 14, **strategy},
        image_processor={**images, "size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}},
    )


FAMILY: Mapping[str, Family] = {
    "qwen2_vl": _qwen_vl("qwen2_vl", configs.qwen2_vl, "Qwen2VLProcessor", patch=14, video="Qwen2VLVideoProcessor"),
    "qwen2_5_vl": _qwen_vl(
        "qwen2_5_vl", configs.qwen2_5_vl, "Qwen2_5_VLProcessor", patch=14, video="Qwen2VLVideoProcessor"
    ),
    "qwen3_vl": _qwen_vl("qwen3_vl", configs.qwen3_vl, "Qwen3VLProcessor", patch=16, video="Qwen3VLVideoProcessor"),
    "qwen3_vl_moe": _qwen_vl(
        "qwen3_vl_moe", configs.qwen3_vl_moe, "Qwen3VLProcessor", patch=16, video="Qwen3VLVideoProcessor"
    ),
    "llava_next_vicuna": _llava(configs.llava_next_vicuna, templates.vicuna(image="<image>\\n")),
    "llava_next_mistral": _llava(configs.llava_next_mistral, templates.mistral(image="<image>\\n")),
    "llava_onevision": Family(
        model_type="llava_onevision",
        config=configs.llava_onevision,
        vocabulary=Vocabulary(
            style="qwen2", eos="<|im_end|>", pad="<|endoftext|>", special=("<|im_start|>", "<image>", "<video>")
        ),
        template=templates.chatml(image="<image>\\n", video="<video>\\n", after_role=" ", end=""),
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 9,
            "vision_feature_select_strategy": "full",
            "vision_aspect_ratio": "anyres_max_4",
        },
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": configs.PINPOINTS_3,
            "size": {"height": 42, "width": 42},
        },
        video_processor={
            "video_processor_type": "LlavaOnevisionVideoProcessor",
            "size": {"height": 42, "width": 42},
        },
    ),
    "deepseek_vl": Family(
        model_type="deepseek_vl",
        config=configs.deepseek_vl,
        vocabulary=Vocabulary(
            style="fast",
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            pad="<｜▁pad▁｜>",
            adds_bos=True,
            named={"image_token": "<image_placeholder>"},
        ),
        template=templates.deepseek(image="<image_placeholder>", end="<｜end▁of▁sentence｜>"),
        processor={"processor_class": "DeepseekVLProcessor", "num_image_tokens": 36},
        image_processor={"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 96, "width": 96}},
    ),
    "kimi_k25": Family(
        model_type="kimi_k25",
        config=configs.kimi_k25,
        vocabulary=Vocabulary(
            style="fast",
            bos="[BOS]",
            eos="<|im_end|>",
            pad="[PAD]",
            special=(
                *("[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
                *("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"),
                "<|kimi_k25_video_placeholder|>",
            ),
        ),
        template=templates.kimi(
            image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n",
            video="<|kimi_k25_video_placeholder|>\\n",
        ),
        processor={"processor_class": "Kimi_K25Processor"},
        image_processor={
            "image_processor_type": "Kimi_K25ImageProcessor",
            "patch_size": 14,
            "merge_size": 2,
            "max_patches": 1024,
            "size": {"max_height": 64, "max_width": 64},
        },
        video_processor={"video_processor_type": "Kimi_K25VideoProcessor", "patch_size": 14, "merge_size": 2},
    ),
    "internvl": Family(
        model_type="internvl",
        config=configs.internvl,
        vocabulary=Vocabulary(
            style="qwen2",
            eos="<|im_end|>",
            pad="<|endoftext|>",
            special=("<|im_start|>",),
            named={
                "start_image_token": "<img>",
                "end_image_token": "</img>",
                "context_image_token": "<IMG_CONTEXT>",
                "video_token": "<video>",
            },
        ),
        template=templates.chatml(image="<IMG_CONTEXT>\\n", video="<video>\\n"),
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 56, "width": 56},
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 12,
        },
        video_processor={"video_processor_type": "InternVLVideoProcessor", "size": {"height": 56, "width": 56}},
    ),
    "smolvlm": Family(
        model_type="smolvlm",
        config=configs.smolvlm,
        vocabulary=Vocabulary(
            style="gpt2",
            bos="<|im_start|>",
            eos="<end_of_utterance>",
            pad="<|im_end|>",
            special=(
                *("<fake_token_around_image>", "<image>", "<global-img>"),
                *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
            ),
        ),
        template=templates.smolvlm(image="<image>", video="<video>"),
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        image_processor={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 256},
            "max_image_size": {"longest_edge": 64},
        },
        video_processor={
            "video_processor_type": "SmolVLMVideoProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 64},
        },
    ),
    "qwen2": Family(
        model_type="qwen2",
        config=configs.text_only,
        vocabulary=Vocabulary(style="qwen2", eos="<|im_end|>", pad="<|endoftext|>", special=("<|im_start|>",)),
        template=templates.chatml(system="You are a helpful assistant."),
    ),
    "llama": Family(
        model_type="llama",
        config=configs.text_only,
        vocabulary=Vocabulary(
            style="fast",
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
            pad="<|finetune_right_pad_id|>",
            adds_bos=True,
            special=("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
        ),
        template=templates.llama3(),
    ),
}
