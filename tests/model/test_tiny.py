"""The tiny models build, load, see images and places, and their processors load with or without torchvision."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import is_torchvision_available

from looseleaf.errors import ConfigError
from looseleaf.model.kimi_images import KimiPilImageProcessor, cut_patches, fit
from looseleaf.model.processors import load_processor
from looseleaf.model.tiny import FAMILIES, build_tiny

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
"""transformers 5.17's InternVL processor hands a tensor to numpy.cumsum; 5.19's does not."""

TEXT_ONLY = ("qwen2", "llama")
VISUAL = tuple(family for family in FAMILIES if family not in TEXT_ONLY)
VISIBLE = 1e-2
"""Share of the logits' range below which a change could pass for noise in a half-precision test."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    family: str
    folder: Path
    model: Any
    processor: Any


def load(family: str, folder: Path) -> Loaded:
    build_tiny(family, folder)
    auto: Any = AutoModelForCausalLM if family in TEXT_ONLY else AutoModelForImageTextToText
    model = auto.from_pretrained(folder).eval()
    return Loaded(family=family, folder=folder, model=model, processor=load_processor(folder))


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory.mktemp("tiny") / request.param)


@pytest.fixture(scope="module", params=VISUAL)
def visual(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory.mktemp("visual") / request.param)


def picture(height: int, width: int, seed: int) -> Image.Image:
    """Coloured blocks: unlike noise they survive the resizing every family does."""
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 14 + 1, width // 14 + 1, 3), dtype=np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST)


def prompt(tiny: Loaded, *, images: int) -> str:
    """Two turns before the question, images and text interleaved, one message with plain string content."""
    parts: list[dict[str, str]] = []
    for number in range(images):
        parts += [{"type": "image"}, {"type": "text", "text": f"This is image {number + 1}. "}]
    messages = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What changed?"}]},
        {"role": "assistant", "content": "The colour."},
        {"role": "user", "content": [{"type": "text", "text": "Which one?"}]},
    ]
    return str(tiny.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode(tiny: Loaded, *images: Image.Image) -> dict[str, Any]:
    text = [prompt(tiny, images=len(images))]
    if images:
        return dict(tiny.processor(text=text, images=list(images), return_tensors="pt"))
    return dict(getattr(tiny.processor, "tokenizer", tiny.processor)(text, return_tensors="pt"))


def ordinary(tiny: Loaded) -> dict[str, Any]:
    return encode(tiny) if tiny.family in TEXT_ONLY else encode(tiny, picture(112, 112, 0), picture(168, 224, 1))


@torch.no_grad()
def last_logits(tiny: Loaded, **inputs: Any) -> torch.Tensor:
    logits: torch.Tensor = tiny.model(**inputs).logits[0, -1]
    return logits


def change(before: torch.Tensor, after: torch.Tensor) -> float:
    return float((after - before).abs().max() / (before.max() - before.min()))


def positions(tiny: Loaded, inputs: dict[str, Any]) -> torch.Tensor:
    ids = inputs["input_ids"]
    if not hasattr(tiny.model.model, "get_rope_index"):
        return torch.arange(ids.shape[1])[None]
    named = {name: inputs[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    place: torch.Tensor = tiny.model.model.get_rope_index(ids, **named)[0]
    return place


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_decides_every_byte(family: str, tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (build_tiny(family, tmp_path / str(n), seed=seed) for n, seed in enumerate((3, 3, 4)))
    assert contents(first) == contents(again)
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= contents(first).keys()
    changed = {name for name, content in contents(other).items() if content != contents(first)[name]}
    assert changed == {"model.safetensors"}
    assert torch.equal(state, torch.random.get_rng_state()), "building must not consume the caller's random numbers"


def test_the_real_classes_load(tiny: Loaded) -> None:
    config = AutoConfig.from_pretrained(tiny.folder)
    assert type(tiny.model.config) is type(config)
    assert type(tiny.model).__module__.startswith("transformers.models.")
    text = config.get_text_config()
    assert text.max_position_embeddings > 100_000 + 4096
    tokenizer = getattr(tiny.processor, "tokenizer", tiny.processor)
    assert len(tokenizer) == text.vocab_size
    assert tiny.model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert not tiny.model.generation_config.do_sample
    heads = {"llava_next_vicuna": 4, "deepseek_vl": 4, "kimi_k25": 4}
    assert (text.num_attention_heads, text.num_key_value_heads) == (4, heads.get(tiny.family, 2))


def test_logits_are_finite_and_of_ordinary_size(tiny: Loaded) -> None:
    with torch.no_grad():
        logits = tiny.model(**ordinary(tiny)).logits
    assert logits.isfinite().all()
    assert 5 < logits.abs().max() < 30


def test_greedy_decoding_goes_on(tiny: Loaded) -> None:
    inputs = ordinary(tiny)
    made = tiny.model.generate(**inputs, max_new_tokens=4)[0, inputs["input_ids"].shape[1] :]
    tokenizer = getattr(tiny.processor, "tokenizer", tiny.processor)
    assert len(made) == 4
    assert not set(made.tolist()) & set(tokenizer.added_tokens_decoder), "special tokens must not be generated"


def test_one_position_shows_and_a_shift_of_everything_does_not(tiny: Loaded) -> None:
    inputs = ordinary(tiny)
    place = positions(tiny, inputs)
    before = last_logits(tiny, **inputs, position_ids=place)
    assert change(before, last_logits(tiny, **inputs)) < 1e-5
    gap = place.clone()
    gap[..., -8:] += 1
    assert change(before, last_logits(tiny, **inputs, position_ids=gap)) > VISIBLE
    # Rotary angles of 100,000 are rounded to 0.004 in single precision, so this is small but not exact.
    assert change(before, last_logits(tiny, **inputs, position_ids=place + 100_000)) < VISIBLE


def test_which_image_comes_first_shows(visual: Loaded) -> None:
    one, two, three = picture(112, 112, 0), picture(168, 224, 1), picture(112, 112, 2)
    before = last_logits(visual, **encode(visual, one, two))
    assert change(before, last_logits(visual, **encode(visual, two, one))) > VISIBLE
    assert change(before, last_logits(visual, **encode(visual, three, two))) > VISIBLE


def test_an_image_becomes_a_handful_of_tokens_that_depend_on_its_size(visual: Loaded) -> None:
    token = visual.model.config.image_token_id
    counts = [int((encode(visual, picture(*size, 0))["input_ids"] == token).sum()) for size in ((112, 112), (168, 224))]
    assert all(16 <= count <= 70 for count in counts)
    assert (counts[0] == counts[1]) == (visual.family == "deepseek_vl"), counts


def test_a_prompt_keeps_the_order_of_its_parts(tiny: Loaded) -> None:
    images = 0 if tiny.family in TEXT_ONLY else 2
    text = prompt(tiny, images=images)
    order = [text.index(part) for part in ("What changed?", "The colour.", "Which one?")]
    assert order == sorted(order)
    if images:
        between = text[text.index("This is image 1.") : text.index("This is image 2.")]
        assert tiny.processor.image_token in between


def test_the_processor_also_renders_and_encodes_in_one_call(visual: Loaded) -> None:
    parts = [{"type": "image", "image": picture(112, 112, 0)}, {"type": "text", "text": "What is this?"}]
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt", "add_generation_prompt": True}
    messages = [{"role": "user", "content": parts}]
    inputs = visual.processor.apply_chat_template(messages, **options)
    assert last_logits(visual, **inputs).isfinite().all()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_next_mistral", "kimi_k25", "llama"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 4096,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_overrides_reach_the_rotary(family: str, rope: dict[str, Any], tmp_path: Path) -> None:
    overrides = {"text_config.rope_parameters": rope, "text_config.num_hidden_layers": 2}
    build_tiny(family, tmp_path, overrides=overrides)
    text = AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert text.num_hidden_layers == 2
    assert text.rope_parameters["rope_type"] == rope["rope_type"]
    assert text.rope_parameters["rope_theta"] > 1.0
    assert ("mrope_section" in text.rope_parameters) == family.startswith("qwen")


def test_a_wrong_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="qwen2_5_vl"):
        build_tiny("qwen9_vl", tmp_path)
    with pytest.raises(ConfigError, match="has no 'layers'"):
        build_tiny("qwen2_5_vl", tmp_path, overrides={"text_config.layers": 3})


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(*args: Any, **_kwargs: Any) -> None:
        raise AssertionError(f"the network was asked for {args}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return


@pytest.mark.usefixtures("no_network")
def test_a_local_folder_is_never_looked_up_on_the_network(tiny: Loaded) -> None:
    assert type(load_processor(str(tiny.folder))) is type(tiny.processor)


def test_a_missing_folder_is_reported_as_transformers_does(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        load_processor(tmp_path / "nowhere")
    with pytest.raises((OSError, ValueError)):
        load_processor(tmp_path)


PROCESSORS = {
    "qwen2_vl": "Qwen2VLProcessor",
    "qwen2_5_vl": "Qwen2_5_VLProcessor",
    "qwen3_vl": "Qwen3VLProcessor",
    "qwen3_vl_moe": "Qwen3VLProcessor",
    "llava_next_vicuna": "LlavaNextProcessor",
    "llava_next_mistral": "LlavaNextProcessor",
    "llava_onevision": "LlavaOnevisionProcessor",
    "deepseek_vl": "DeepseekVLProcessor",
    "kimi_k25": "Kimi_K25Processor",
    "internvl": "InternVLProcessor",
    "smolvlm": "SmolVLMProcessor",
}


def test_the_processor_is_of_the_familys_own_class_and_can_be_saved(visual: Loaded, tmp_path: Path) -> None:
    assert isinstance(visual.processor, getattr(transformers, PROCESSORS[visual.family]))
    visual.processor.save_pretrained(tmp_path)
    visual.model.config.save_pretrained(tmp_path)
    images = [picture(112, 112, 0)]
    before, after = (kind.image_processor(images) for kind in (visual.processor, load_processor(tmp_path)))
    assert np.array_equal(np.asarray(before["pixel_values"]), np.asarray(after["pixel_values"]))


@pytest.mark.skipif(is_torchvision_available(), reason="with torchvision there are video processors")
def test_without_torchvision_a_video_says_what_is_missing(visual: Loaded) -> None:
    if "video_processor" not in visual.processor.get_attributes():
        pytest.skip("this family has no video")
    with pytest.raises(ImportError, match="install it for videos"):
        visual.processor.video_processor([np.zeros((2, 3, 28, 28), np.uint8)])


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((112, 112), (112, 112, 112, 112)),
        ((113, 27), (113, 27, 140, 28)),
        ((5, 5), (5, 5, 28, 28)),
        ((1200, 900), (520, 390, 532, 392)),
        ((30, 2000), (13, 896, 28, 896)),
    ],
)
def test_kimi_scales_and_pads_as_transformers_does(size: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert fit(*size, patch_size=14, merge_size=2, max_patches=1024, max_side=64) == expected


def test_kimi_patches_are_cut_row_by_row() -> None:
    image = np.arange(3 * 4 * 6).reshape(3, 4, 6)
    patches = cut_patches(image, 2)
    assert patches.shape == (6, 3, 2, 2)
    assert np.array_equal(patches[4], image[:, 2:4, 2:4])


def test_kimi_pixels_are_normalised_and_the_border_is_black() -> None:
    processor = KimiPilImageProcessor(size={"max_height": 64, "max_width": 64})
    inputs = processor([Image.new("RGB", (30, 20), (255, 255, 255))], return_tensors="np")
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert inputs["pixel_values"].shape == (8, 3, 14, 14)
    assert inputs["pixel_values"][0].min() == pytest.approx(1.0)
    assert inputs["pixel_values"][-1].max() == pytest.approx(-1.0)


@pytest.mark.skipif(not is_torchvision_available(), reason="there is nothing to compare with")
def test_kimi_agrees_with_transformers_own_processor(tmp_path: Path) -> None:
    theirs = load_processor(build_tiny("kimi_k25", tmp_path)).image_processor
    ours = KimiPilImageProcessor.from_pretrained(tmp_path)
    images = [picture(112, 112, 0), picture(1200, 900, 1), picture(37, 100, 2)]
    one, two = theirs(images, return_tensors="pt"), ours(images, return_tensors="pt")
    assert torch.equal(one["image_grid_thw"], two["image_grid_thw"])
    assert (one["pixel_values"] - two["pixel_values"]).abs().max() < 2.5 / 127.5
    assert theirs.to_dict() == ours.to_dict()
