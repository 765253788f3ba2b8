"""The models we train are the stock ones: built, loaded, seen and read alike, only many images at a time."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImage
from torch import Tensor
from transformers import AutoModelForImageTextToText

from looseleaf import Config, Looseleaf
from looseleaf.errors import ConfigError, PromptError
from looseleaf.model.loading import load_adapter
from looseleaf.model.processors import load_processor
from looseleaf.model.tiny.vocabulary import CORPUS
from looseleaf.model.tiny.weights import draw_weights
from looseleaf.training import attention
from looseleaf.training.families import LONGEST, Trainee
from looseleaf.training.recipes import PLACES, RECIPES, build_folder

NAMES = tuple(RECIPES)
DYNAMIC = ("qwen2_5_vl", "qwen3_vl", "kimi_k25")
TOKENS = {"qwen2_5_vl": 64, "qwen3_vl": 256, "kimi_k25": 64, "deepseek_vl": 256}
SIZES = {name: [(112, 112), (224, 168), (224, 280)] for name in DYNAMIC} | {"deepseek_vl": [(224, 224)] * 3}
SMALL = dict.fromkeys(DYNAMIC, (56, 56)) | {"deepseek_vl": (224, 224)}

SYLLABLES = [a + b for a, b in product("bdfgklmnprst", "aeiou")]
WORDS = (*CORPUS, *(" ".join(first + second for second in SYLLABLES) for first in SYLLABLES))
"""Enough different words for a full vocabulary."""

TOLERANCE = 1e-4
"""Of the largest logit; the same work in another order in fp32."""
VISIBLE = 1e-2
"""A change of the logits that is no noise."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A freshly initialised folder by name, built once."""

    @cache
    def build(name: str) -> Path:
        return build_folder(name, tmp_path_factory.mktemp("recipes") / name, corpus=WORDS, seed=0)

    return build


@pytest.fixture(scope="module")
def pair_of(folder_of: Callable[[str], Path]) -> Callable[[str], tuple[Any, Trainee]]:
    """The stock model and a trainee with the same weights, large enough that a wrong place or patch would show."""

    @cache
    def load(name: str) -> tuple[Any, Trainee]:
        stock = AutoModelForImageTextToText.from_pretrained(folder_of(name)).eval()
        draw_weights(stock, seed=1, special_ids=[])
        trainee = Trainee.load(folder_of(name))
        trainee.model.load_state_dict(stock.state_dict())
        return stock, trainee

    return load


def picture(size: tuple[int, int], seed: int) -> PILImage.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return PILImage.fromarray(pixels)


def as_tensor(*images: PILImage.Image) -> Tensor:
    return torch.stack([torch.from_numpy(np.array(one)).permute(2, 0, 1) / 255 for one in images])


def chat(images: int) -> list[dict[str, Any]]:
    parts: list[dict[str, str]] = []
    for number in range(images):
        parts += [{"type": "text", "text": f"Image {number + 1}: "}, {"type": "image"}]
    return [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What changed?"}]},
        {"role": "assistant", "content": "The colour."},
        {"role": "user", "content": [{"type": "text", "text": "Which one?"}]},
    ]


def stock_inputs(trainee: Trainee, images: Sequence[PILImage.Image]) -> dict[str, Any]:
    text = trainee.processor.apply_chat_template(chat(len(images)), tokenize=False, add_generation_prompt=True)
    return dict(trainee.processor(text=[text], images=list(images), return_tensors="pt"))


def positions_of(stock: Any, inputs: dict[str, Any], axes: int) -> Tensor:
    """[axis, 1, token], by the model's own rule."""
    ids = inputs["input_ids"]
    if axes == 1:
        return torch.arange(ids.shape[1]).view(1, 1, -1)
    kinds = (ids == stock.config.image_token_id).int()
    grids = inputs["image_grid_thw"]
    return stock.base_model.get_rope_index(input_ids=ids, mm_token_type_ids=kinds, image_grid_thw=grids)[0]


def causal(tokens: int) -> Tensor:
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]


def embedded(trainee: Trainee, ids: Tensor, batches: Sequence[Tensor]) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Embeddings with visual rows in place, their slots, and deepstack's rows, from images in batches of one size."""
    features = [trainee.features(batch) for batch in batches]
    slots = ids == trainee.pad_id
    rows = torch.cat([one.rows.flatten(0, 1) for one in features])
    deep = [torch.cat([one.flatten(0, 1) for one in level]) for level in zip(*(f.deep for f in features), strict=True)]
    return trainee.fill(trainee.embed(ids), slots, rows), slots, deep


@torch.no_grad()
def our_logits(trainee: Trainee, ids: Tensor, positions: Tensor, batches: Sequence[Tensor], mask: Any = None) -> Tensor:
    embeds, slots, deep = embedded(trainee, ids, batches)
    mask = causal(ids.shape[1]) if mask is None else mask
    return trainee.logits(trainee.hidden(embeds, positions, mask, slots, deep))


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).detach().abs().max() / expected.detach().abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_loads_like_any_other_and_has_the_planned_size(name: str, folder_of: Callable[[str], Path]) -> None:
    folder = folder_of(name)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert 12e6 < sum(one.numel() for one in model.parameters()) < 15.2e6
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.config.get_text_config().max_position_embeddings == 32_768
    processor = load_processor(folder)
    assert 1_500 < len(processor.tokenizer) <= model.get_input_embeddings().num_embeddings == 1_536
    adapter = load_adapter(folder)
    with Looseleaf(adapter, Config()) as system:
        image = picture(SMALL[name], 0)
        answer = system.ask([image, "What is in this image?", image, "And in this one?"], max_tokens=2)
    assert answer.usage.prompt_tokens > 0


@pytest.mark.parametrize("name", NAMES)
def test_images_become_the_planned_number_of_tokens(name: str, pair_of: Callable[..., Any]) -> None:
    _, trainee = pair_of(name)
    rows, columns = trainee.grid(224, 224)
    assert rows == columns
    assert rows * columns == TOKENS[name]
    assert trainee.features(torch.rand(2, 3, 224, 224)).rows.shape == (2, TOKENS[name], 384)
    for size in [(225, 224), (28 * 60, 28 * 60)]:
        with pytest.raises(ConfigError):
            trainee.grid(*size)


@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_of_several_sizes_is_read_as_by_the_stock_model(name: str, pair_of: Callable[..., Any]) -> None:
    stock, trainee = pair_of(name)
    images = [picture(size, seed) for seed, size in enumerate(SIZES[name])]
    inputs = stock_inputs(trainee, images)
    ids = torch.tensor([trainee.prompt_ids(chat(3), SIZES[name])])
    assert torch.equal(ids, inputs["input_ids"])
    before, after = trainee.image_text
    assert f"{before}{trainee.processor.image_token}" in trainee.tokenizer.decode(ids[0])
    assert f"{trainee.processor.image_token}{after}" in trainee.tokenizer.decode(ids[0])
    with torch.no_grad():
        expected = stock(**inputs).logits
    positions = positions_of(stock, inputs, trainee.axes)
    got = our_logits(trainee, ids, positions, [as_tensor(one) for one in images])
    assert distance(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_images_is_read_as_by_the_stock_model(name: str, pair_of: Callable[..., Any]) -> None:
    stock, trainee = pair_of(name)
    images = [picture((224, 224), seed) for seed in range(3)]
    inputs = stock_inputs(trainee, images)
    with torch.no_grad():
        expected = stock(**inputs).logits
    positions = positions_of(stock, inputs, trainee.axes)
    got = our_logits(trainee, inputs["input_ids"], positions, [as_tensor(*images)])
    assert distance(got, expected) < TOLERANCE
    swapped = our_logits(trainee, inputs["input_ids"], positions, [as_tensor(*images[::-1])])
    assert distance(swapped, expected) > VISIBLE


@pytest.mark.parametrize("name", DYNAMIC)
def test_attention_runs_once_a_block_however_many_images(
    name: str, pair_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, trainee = pair_of(name)
    images = torch.rand(5, 3, 112, 84)
    alone = torch.cat([trainee.features(one[None]).rows for one in images])
    calls: list[Any] = []
    attend = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention,
        "scaled_dot_product_attention",
        lambda *args, **more: calls.append(args[0].shape[0]) or attend(*args, **more),
    )
    together = trainee.features(images).rows
    assert calls == [5] * len(trainee.tower.blocks)
    assert distance(together, alone) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_any_mask_is_obeyed(name: str, pair_of: Callable[..., Any]) -> None:
    stock, trainee = pair_of(name)
    size = SMALL[name]
    images = [picture(size, seed) for seed in range(2)]
    inputs = stock_inputs(trainee, images)
    ids, batch = inputs["input_ids"], as_tensor(*images)
    positions = positions_of(stock, inputs, trainee.axes)
    rows, columns = trainee.grid(*size)
    start = int((ids[0] == trainee.pad_id).nonzero()[0])
    stop = start + rows * columns

    at = torch.arange(ids.shape[1])
    query, key = at[:, None], at[None, :]
    dense = ((query >= key) & ~((key >= start) & (key < stop) & (query >= stop)))[None, None]
    plain = our_logits(trainee, ids, positions, [batch])
    ours = our_logits(trainee, ids, positions, [batch], dense)
    assert distance(ours, plain) > VISIBLE
    trainee.text.set_attn_implementation("sdpa")
    try:
        assert distance(our_logits(trainee, ids, positions, [batch], dense), ours) < TOLERANCE
    finally:
        trainee.text.set_attn_implementation(attention.TEXT)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", NAMES)
def test_blocks_are_attended_as_their_mask(name: str, pair_of: Callable[..., Any]) -> None:
    _, trainee = pair_of(name)
    tokens = 4 * attention.BLOCK
    segments = torch.arange(tokens).expand(2, -1) // torch.tensor([[64], [160]])
    mask = ((segments[:, :, None] == segments[:, None]) & causal(tokens)[0])[:, None]
    mask[:, :, 400:, :200] = True
    blocks = attention.in_blocks(mask)
    assert blocks.to_dense()[:, 0].tolist() == [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1]],
    ], "those in which nothing is seen are left out"
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.sum() == 0, "128 queries from 384 on see 16 keys or fewer of some block"
    embeds, positions = torch.randn(2, tokens, 384), torch.arange(tokens).expand(trainee.axes, 2, -1)
    with torch.no_grad():
        expected, got = (trainee.hidden(embeds, positions, one) for one in (mask, blocks))
    assert distance(got, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["qwen2_5_vl", "deepseek_vl"])
def test_heads_whose_queries_or_keys_grow_too_long_are_made_smaller(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    trainee = Trainee.load(folder_of(name))
    attending = trainee.text.layers[2].self_attn
    with torch.no_grad():
        attending.q_proj.weight[64:128] *= 50
        attending.k_proj.weight[:64] *= 50
    before = {key: value.clone() for key, value in trainee.model.state_dict().items()}
    embeds, positions = torch.randn(2, 40, 384), torch.arange(40).expand(trainee.axes, 2, -1)

    def look() -> None:
        with torch.no_grad():
            trainee.hidden(embeds, positions, causal(40).expand(2, -1, -1, -1))

    look()
    queries = attending.q_proj.out_features // 64
    assert (attending.lengths > LONGEST).nonzero().flatten().tolist() == [1, queries]
    trainee.shorten()
    look()
    assert (attending.lengths <= 1.01 * LONGEST).all()
    changed = [key for key, value in trainee.model.state_dict().items() if not torch.equal(value, before[key])]
    assert {key.rpartition(".")[0] for key in changed} == {
        f"model.language_model.layers.2.self_attn.{one}" for one in ("q_proj", "k_proj")
    }
    assert torch.equal(
        attending.q_proj.weight[:64], before["model.language_model.layers.2.self_attn.q_proj.weight"][:64]
    )


def test_a_smaller_picture_is_the_upper_left_of_a_square(pair_of: Callable[..., Any]) -> None:
    _, trainee = pair_of("deepseek_vl")
    look = trainee.model.base_model.vision_model.embeddings
    square = torch.rand(2, 3, 224, 224)
    caught: list[Tensor] = []
    hook = look.register_forward_hook(lambda *seen: caught.append(seen[2]))
    for images in (square, square[:, :, :112, :168], square):
        rows, columns = trainee.grid(*images.shape[-2:])
        assert trainee.features(images).rows.shape == (2, rows * columns, 384)
    hook.remove()
    whole, part, again = caught
    assert torch.equal(part, whole.view(2, 16, 16, -1)[:, :8, :12].flatten(1, 2))
    assert torch.equal(again, whole)


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_learns_under_autocast(name: str, folder_of: Callable[[str], Path]) -> None:
    trainee = Trainee.load(folder_of(name))
    size = SMALL[name]
    ids = torch.tensor([trainee.prompt_ids(chat(1), [size])] * 2)
    positions = torch.arange(ids.shape[1]).expand(trainee.axes, 2, -1)
    with torch.autocast("cpu", torch.bfloat16):
        embeds, slots, deep = embedded(trainee, ids, [torch.rand(2, 3, *size)])
        logits = trainee.logits(trainee.hidden(embeds, positions, causal(ids.shape[1]), slots, deep))
    assert logits.dtype == torch.bfloat16
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    for weight, parameter in trainee.model.named_parameters():
        assert parameter.grad is not None, weight
        assert parameter.grad.isfinite().all(), weight
        assert parameter.grad.any(), weight


@pytest.mark.parametrize("name", NAMES)
def test_each_block_can_be_compiled_whole(name: str, folder_of: Callable[[str], Path]) -> None:
    trainee = Trainee.load(folder_of(name))
    size = SMALL[name]
    ids = torch.tensor([trainee.prompt_ids(chat(1), [size])])
    positions = torch.arange(ids.shape[1]).expand(trainee.axes, 1, -1)
    expected = our_logits(trainee, ids, positions, [torch.ones(1, 3, *size)])
    for block in trainee.blocks:
        block.compile(fullgraph=True, backend="eager")
    assert distance(our_logits(trainee, ids, positions, [torch.ones(1, 3, *size)]), expected) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_is_the_same_in_bf16(name: str, pair_of: Callable[..., Any], tmp_path: Path) -> None:
    stock, trainee = pair_of(name)
    folder = trainee.save(tmp_path / "saved")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    assert {file.name for file in folder.iterdir()} == {file.name for file in trainee.folder.iterdir()}
    loaded = AutoModelForImageTextToText.from_pretrained(folder)
    assert loaded.dtype == torch.bfloat16
    expected = stock.state_dict()
    for weight, value in loaded.state_dict().items():
        assert torch.equal(value, expected[weight].to(torch.bfloat16)), weight
    again = Trainee.load(folder)
    assert again.prompt_ids(chat(1), [SMALL[name]]) == trainee.prompt_ids(chat(1), [SMALL[name]])
    assert trainee.model.dtype == torch.float32


def test_the_same_seed_gives_the_same_bytes(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    for name in NAMES:
        again = build_folder(name, tmp_path / name, corpus=WORDS, seed=0)
        for file in folder_of(name).iterdir():
            assert file.read_bytes() == (again / file.name).read_bytes(), file
    other = build_folder(NAMES[0], tmp_path / "other", corpus=WORDS, seed=1)
    assert (other / "model.safetensors").read_bytes() != (folder_of(NAMES[0]) / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="unknown recipe"):
        build_folder("gpt", tmp_path / "gpt", corpus=WORDS, seed=0)


@pytest.mark.parametrize("name", NAMES)
def test_fresh_weights_are_small_and_those_that_add_to_the_stream_smaller(
    name: str, folder_of: Callable[[str], Path]
) -> None:
    model = AutoModelForImageTextToText.from_pretrained(folder_of(name)).requires_grad_(False)
    scaled = {"text": 0.02 / 4, "vision": 0.02 / 8**0.5}
    seen = {"text": 0, "vision": 0}
    for path, weight in model.named_parameters():
        kind = "text" if "language_model" in path else "vision"
        if weight.dim() == 1:
            assert (weight == (1 if path.endswith("weight") else 0)).all(), path
            continue
        if "position_embedding." in path:
            assert weight.abs().max() <= PLACES, path
            places = torch.nn.functional.normalize(weight, dim=1)
            alike = (places @ places[17]).view(16, 16)
            assert alike[1, 1] > alike[1, 2] > alike[1, 5], "near places are alike"
            continue
        small = abs(float(weight.std()) / scaled[kind] - 1) < 0.05
        seen[kind] += small
        assert small or abs(float(weight.std()) / 0.02 - 1) < 0.05, path
    assert seen == {"text": 16, "vision": 8}


TOOL = {"type": "function", "function": {"name": "crop", "parameters": {"type": "object", "properties": {}}}}
SHOWN: list[dict[str, Any]] = [
    {"type": "text", "text": "Here is "},
    {"type": "image"},
    {"type": "text", "text": " and "},
    {"type": "image"},
]
CALLS: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Crop it."},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "crop", "arguments": {"row": 1}}}]},
    {"role": "tool", "content": SHOWN},
    {"role": "tool", "content": "done"},
    {"role": "user", "content": "What is it?"},
]


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_lists_tools_and_shows_calls_and_responses(name: str, pair_of: Callable[..., Any]) -> None:
    _, trainee = pair_of(name)
    text = trainee.tokenizer.apply_chat_template(CALLS, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    head, _, rest = text.partition("<|im_end|>\n")
    assert head.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in head
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    assert rest == (
        "<|im_start|>user\nCrop it.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "crop", "arguments": {"row": 1}}\n</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>\nHere is {image} and {image}\n</tool_response>"
        "\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nWhat is it?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = trainee.tokenizer.apply_chat_template(CALLS[1:2], tokenize=False, add_generation_prompt=True)
    assert plain == "<|im_start|>user\nCrop it.<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("name", NAMES)
def test_what_a_tool_answers_may_hold_images(name: str, pair_of: Callable[..., Any]) -> None:
    _, trainee = pair_of(name)
    size = SMALL[name]
    ids = trainee.prompt_ids(CALLS, [size, size])
    rows, columns = trainee.grid(*size)
    assert ids.count(trainee.pad_id) == 2 * rows * columns
    text = trainee.tokenizer.decode(ids)
    places = [text.index(words) for words in ("Be brief.", "Crop it.", "Here is ", " and ", "done", "What is it?")]
    assert places == sorted(places)
    with pytest.raises(PromptError, match="shows 2 images"):
        trainee.prompt_ids(CALLS, [size])
