"""Building prompts: tokens and positions are the family's own processor's and model's, each image is processed once."""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PILImages
from PIL.Image import Image as PILImage

import looseleaf.prompt.build as build_module
from looseleaf import Clip, Document, FullReuse, Image, Looseleaf, Message, Reprefill
from looseleaf.errors import ConfigError, LimitError, MediaError, PromptError
from looseleaf.link.reference import error
from looseleaf.model.adapter import Adapter
from looseleaf.model.probe import stock_attention
from looseleaf.model.tiny import FAMILIES
from looseleaf.prompt.build import PromptBuilder
from looseleaf.prompt.chunks import Chunk, Prompt, assemble
from looseleaf.prompt.segments import as_messages

pytestmark = pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")
"""transformers 5.17's InternVL processor hands a tensor to numpy.cumsum; 5.19's does not."""

TEXT_ONLY = ("qwen2", "llama")
VISUAL = tuple(family for family in FAMILIES if family not in TEXT_ONLY)
MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe")
CLIPS = ("qwen2_vl", "qwen2_5_vl")
SPACES = ("llava_next_vicuna", "llava_next_mistral")
"""Families whose tokenizer marks the space in front of a word."""

Load = Callable[..., Adapter]
Open = Callable[..., Looseleaf]


def picture(width: int, height: int, seed: int) -> PILImage:
    blocks = np.random.default_rng(seed).integers(0, 256, (height // 14 + 1, width // 14 + 1, 3), dtype=np.uint8)
    return PILImages.fromarray(blocks).resize((width, height), PILImages.Resampling.NEAREST)


A, B, C = Image(picture(112, 112, 0)), Image(picture(224, 168, 1)), Image(picture(112, 112, 2))
SYSTEM = {"role": "system", "content": "Answer in one word."}
LAYOUTS: dict[str, Any] = {
    "image first": [A, "What is this?"],
    "image last": ["Describe this:", B],
    "image alone": [A],
    "two images side by side": ["Compare", A, B, "with care."],
    "two images and nothing else": [B, A],
    "images and words in turn": ["First", A, " then ", B, "\nthen", C, "."],
    "the same image twice": [A, "and again", A, "?"],
    "words that begin and end with line ends": ["Look:\n\n", A, "\n\nWell?"],
    "words that touch": ["x", A, "y", B, "z"],
    "a system message": [SYSTEM, {"role": "user", "content": [A, "Colour?"]}],
    "several turns": [
        SYSTEM,
        {"role": "user", "content": ["Look at", A]},
        {"role": "assistant", "content": "A red square."},
        {"role": "user", "content": [B, "And this?", C]},
        {"role": "assistant", "content": ["Two", " squares."]},
        {"role": "user", "content": "Which is larger?"},
    ],
    "odd letters": ["Größe 漢字 😀 ", A, "\u00a0\t?"],
}
TEXTS: dict[str, Any] = {
    "a question": "What is 2 + 2?",
    "several texts": ["One", " two", "three"],
    "a system message": [SYSTEM, {"role": "user", "content": "Colour?"}],
    "several turns": [
        SYSTEM,
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello yourself."},
        {"role": "user", "content": ["And", " now?"]},
    ],
    "odd letters": "Größe 漢字 😀 \u00a0\t?",
}


def spoken(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as transformers' chat templates take it, pictures included."""
    return [
        {
            "role": message.role,
            "content": [
                {"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one.source}
                for one in message.content
            ],
        }
        for message in as_messages(prompt)
    ]


def pictures(prompt: Any) -> list[PILImage]:
    return [one.source for message in as_messages(prompt) for one in message.content if isinstance(one, Image)]


def processed(adapter: Adapter, prompt: Any) -> dict[str, Any]:
    """The whole prompt through the family's own processor: rendered by it, expanded by it, tokenised by it."""
    processor = adapter.processor
    rendered = processor.apply_chat_template(spoken(prompt), tokenize=False, add_generation_prompt=True)
    bos = adapter.tokenizer.bos_token
    shown = pictures(prompt)
    return dict(
        processor(
            text=[rendered], images=[shown] if adapter.family.fewer_among_others else shown, return_tensors="pt",
            add_special_tokens=not (bos and rendered.startswith(bos)),
        )
    )  # fmt: skip


def named_for(call: Any, given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in inspect.signature(call).parameters}


def own_positions(adapter: Adapter, prompt: Prompt) -> torch.Tensor:
    """Where the model itself puts every token of a whole prompt [axis, token]."""
    ids = torch.tensor([prompt.ids])
    kinds = torch.zeros_like(ids, dtype=torch.int)
    kinds[ids == adapter.image_token_id] = 1
    kinds[ids == adapter.video_token_id] = 2
    inputs = joined(prompt.chunks)
    rule = adapter.model.base_model.get_rope_index
    positions: torch.Tensor = rule(input_ids=ids, mm_token_type_ids=kinds, **named_for(rule, inputs))[0][:, 0]
    return positions


def joined(spans: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What the vision tower takes for all chunks together."""
    inputs: dict[str, list[torch.Tensor]] = {}
    for span in spans:
        for name, value in span.chunk.inputs.items():
            inputs.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in inputs.items()}


def kinds(prompt: Prompt) -> list[str]:
    return [span.chunk.kind if span.chunk else "text" for span in prompt.spans]


@pytest.fixture
def builder(adapter_of: Load) -> PromptBuilder:
    return PromptBuilder(adapter_of("qwen2_5_vl"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", VISUAL)
def test_our_tokens_are_the_processors_own(adapter_of: Load, family: str, layout: str) -> None:
    adapter = adapter_of(family)
    built = PromptBuilder(adapter).build(LAYOUTS[layout])
    given = processed(adapter, LAYOUTS[layout])
    assert list(built.ids) == given["input_ids"][0].tolist()
    images = pictures(LAYOUTS[layout])
    assert len(built.chunks) == len(images)
    marked = [at for at, one in enumerate(built.ids) if one == adapter.image_token_id]
    covered = [span.start + one for span in built.chunks if span.chunk for one in span.chunk.visual]
    assert covered == marked, "every visual token belongs to a chunk"


@pytest.mark.parametrize("family", VISUAL)
def test_chunks_carry_what_the_processor_gives_the_vision_tower(adapter_of: Load, family: str) -> None:
    adapter = adapter_of(family)
    for image in (A, B):
        built = PromptBuilder(adapter).build(["Look", image, "well?"])
        given = processed(adapter, ["Look", image, "well?"])
        (span,) = built.chunks
        assert span.chunk is not None
        assert span.chunk.inputs
        for name, value in span.chunk.inputs.items():
            assert torch.equal(value, given[name]), name


@pytest.mark.parametrize("layout", TEXTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_without_images_are_the_tokenizers_own(adapter_of: Load, family: str, layout: str) -> None:
    adapter = adapter_of(family)
    turns = [
        {"role": message.role, "content": "".join(map(str, message.content))} for message in as_messages(TEXTS[layout])
    ]
    template = getattr(adapter.processor, "chat_template", None) or adapter.tokenizer.chat_template
    rendered = adapter.tokenizer.apply_chat_template(
        turns, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    bos = adapter.tokenizer.bos_token
    expected = adapter.tokenizer(rendered, add_special_tokens=not (bos and rendered.startswith(bos)))["input_ids"]
    built = PromptBuilder(adapter).build(TEXTS[layout])
    assert list(built.ids) == expected
    assert kinds(built) == ["text"]


@pytest.mark.parametrize("family", VISUAL)
def test_our_prompt_of_two_images_is_what_apply_chat_template_makes(adapter_of: Load, family: str) -> None:
    adapter = adapter_of(family)
    options: dict[str, Any] = {"tokenize": True, "return_dict": True, "add_generation_prompt": True}
    prompt = ["Compare", A, "and", B]
    given = adapter.processor.apply_chat_template(spoken(prompt), **options)
    assert list(PromptBuilder(adapter).build(prompt).ids) == list(np.asarray(given["input_ids"]).ravel())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MROPE)
def test_positions_are_the_models_own(adapter_of: Load, family: str, layout: str) -> None:
    adapter = adapter_of(family)
    built = PromptBuilder(adapter).build(LAYOUTS[layout])
    given = processed(adapter, LAYOUTS[layout])
    rule = adapter.model.base_model.get_rope_index
    given.pop("attention_mask", None)
    positions, delta = rule(**named_for(rule, given))
    assert torch.equal(built.positions, positions[:, 0])
    assert built.next_pos == len(built) + int(delta), "where the model would put the first decoded token"


@pytest.mark.parametrize("family", FAMILIES)
def test_spans_tile_the_prompt_and_positions_go_on(adapter_of: Load, family: str) -> None:
    adapter = adapter_of(family)
    chunk: Any = Document("A page.") if family in TEXT_ONLY else A
    built = PromptBuilder(adapter).build(["See", chunk, "and", Document("Another page."), "well?"])
    assert [span.start for span in built.spans] == [0, *(span.stop for span in built.spans[:-1])]
    assert built.spans[-1].stop == len(built) == built.positions.shape[1]
    assert built.positions.shape[0] == adapter.axes
    for span, following in zip(built.spans, built.spans[1:], strict=False):
        assert int(built.positions[0, span.start]) == span.start_pos
        advance = span.chunk.placement.advance if span.chunk else len(span)
        assert following.start_pos == span.start_pos + advance
    if adapter.axes == 1:
        assert built.positions[0].tolist() == list(range(len(built)))
    assert built.next_pos == int(built.positions.max()) + 1


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next_mistral", "llama"])
def test_a_start_position_moves_everything_by_as_much(adapter_of: Load, family: str) -> None:
    builder = PromptBuilder(adapter_of(family))
    prompt: list[Any] = ["See", Document("A page."), "well?"] if family == "llama" else ["See", A, "well?"]
    here, there = builder.build(prompt), builder.build(prompt, start_pos=1000)
    assert there.ids == here.ids
    assert torch.equal(there.positions, here.positions + 1000)
    assert there.next_pos == here.next_pos + 1000


def test_the_answers_slots_follow_the_prompts(builder: PromptBuilder) -> None:
    built = builder.build([B, "well?"])
    more = built.positions_to(len(built) + 3)
    assert torch.equal(more[:, : len(built)], built.positions)
    assert more[:, len(built) :].tolist() == [[built.next_pos + at for at in range(3)]] * 3


MARKERS = {
    "qwen2_5_vl": "<|image_pad|>", "qwen3_vl": "<|video_pad|>", "llava_next_vicuna": "<image>",
    "llava_onevision": "<video>", "deepseek_vl": "<image_placeholder>", "kimi_k25": "<|media_pad|>",
    "internvl": "<IMG_CONTEXT>", "smolvlm": "<image>",
}  # fmt: skip


@pytest.mark.parametrize("family", MARKERS)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_text_that_looks_like_an_image_is_refused(adapter_of: Load, family: str, role: str) -> None:
    builder = PromptBuilder(adapter_of(family))
    text = f"before {MARKERS[family]} after"
    turns = [Message(role, (text,)), Message("user", ("Well?", A))]
    with pytest.raises(PromptError, match="stands for an image or document; leave it out"):
        builder.build(turns)
    assert builder.build(["before", A, "after"])


def test_text_that_looks_like_a_document_is_refused(builder: PromptBuilder) -> None:
    with pytest.raises(PromptError, match="stands for an image or document"):
        builder.build(["\u241e0\u241e", Document("A page.")])
    assert builder.build([Document("\u241e0\u241e"), Document("x"), "a document may say so"])


@pytest.mark.parametrize("family", MARKERS)
def test_a_document_that_looks_like_an_image_is_refused_too(adapter_of: Load, family: str) -> None:
    with pytest.raises(PromptError, match="stands for an image"):
        PromptBuilder(adapter_of(family)).build([Document(f"a page with {MARKERS[family]}"), "Well?"])


def test_two_texts_that_join_to_a_marker_are_refused(builder: PromptBuilder) -> None:
    with pytest.raises(PromptError, match="stands for an image"):
        builder.build(["see <|image", "_pad|> here"])


@pytest.mark.parametrize(
    "segment", ["half a \ud800 character", Document("half a \ud800 character")], ids=["text", "page"]
)
def test_half_a_character_is_refused(builder: PromptBuilder, segment: Any) -> None:
    with pytest.raises(PromptError):
        builder.build([segment, "Well?"])


def test_documents_are_tokenised_alone(adapter_of: Load) -> None:
    for family in ("qwen2", "llama", "qwen3_vl", "kimi_k25"):
        adapter = adapter_of(family)
        text = "The total is 1280.\nPay soon"
        built = PromptBuilder(adapter).build(["Read ", Document(text), " and answer: ", Document("B"), "?"])
        first, second = built.chunks
        assert kinds(built) == ["text", "document", "text", "document", "text"]
        assert (
            list(built.ids[first.start : first.stop]) == adapter.tokenizer(text, add_special_tokens=False)["input_ids"]
        )
        assert f"Read {text} and answer: B?" in adapter.tokenizer.decode(built.ids)
        assert first.chunk is not None
        assert first.chunk.visual == ()
        assert second.chunk is not None
        assert first.chunk.content != second.chunk.content


@pytest.mark.parametrize("family", SPACES)
def test_no_space_appears_around_a_document(adapter_of: Load, family: str) -> None:
    adapter = adapter_of(family)
    built = PromptBuilder(adapter).build(["Total: $", Document("12"), "80 in all"])
    assert "Total: $1280 in all" in adapter.tokenizer.decode(built.ids)


def test_a_documents_content_is_its_text_and_nothing_else(builder: PromptBuilder) -> None:
    def content(prompt: Any) -> str:
        chunk = builder.build(prompt).chunks[0].chunk
        assert chunk is not None
        return chunk.content

    page = Document("A page.")
    assert content(["one", page, "two"]) == content([page, "other"]) == content([SYSTEM, Message("user", (page, "x"))])
    assert content([page, "x"]) != content([Document("A page"), "x"])


def test_an_empty_document_is_refused(builder: PromptBuilder) -> None:
    with pytest.raises(PromptError, match="Document is empty"):
        builder.build([Document(""), "Well?"])


def test_images_documents_and_clips_keep_their_order(builder: PromptBuilder) -> None:
    clip = Clip([A, C])
    built = builder.build([A, Document("one"), clip, B, Document("two"), A, "Well?"])
    assert kinds(built) == ["text", "image", "document", "clip", "image", "document", "image", "text"]
    sizes = [len(span) for span in built.chunks]
    assert sizes[0] == sizes[5] != sizes[3]
    assert built.chunks[0].chunk.content == built.chunks[5].chunk.content  # type: ignore[union-attr]


class Counting:
    """A processor that counts how often it is called."""

    def __init__(self, processor: Any):
        self.processor = processor
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.processor, name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.processor(*args, **options)


@pytest.fixture
def counting(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> Counting:
    counter = Counting(builder.adapter.processor)
    monkeypatch.setattr(builder.adapter, "processor", counter)
    return counter


def only_chunk(prompt: Prompt) -> Chunk:
    (span,) = prompt.chunks
    assert span.chunk is not None
    return span.chunk


def test_a_known_image_is_not_processed_again(builder: PromptBuilder, counting: Counting) -> None:
    first = only_chunk(builder.build(["One", A, "two"]))
    assert counting.calls == 1
    again = only_chunk(builder.build(["Other words", Image(A.source.copy()), "around it"]))  # type: ignore[union-attr]
    assert counting.calls == 1
    assert (again.content, again.ids, again.visual) == (first.content, first.ids, first.visual)
    assert torch.equal(again.placement.positions, first.placement.positions)
    builder.build([A, B, A, B])
    assert counting.calls == 2


def test_the_pixels_of_a_known_image_are_made_when_somebody_asks(builder: PromptBuilder, counting: Counting) -> None:
    first = only_chunk(builder.build([A, "one"]))
    again = only_chunk(builder.build([A, "two"]))
    assert counting.calls == 1
    assert set(again.inputs) == set(first.inputs)
    assert len(again.inputs) == len(first.inputs)
    assert all(torch.equal(again.inputs[name], first.inputs[name]) for name in first.inputs)
    assert counting.calls == 2, "once for all of them"


def test_shapes_are_forgotten_when_there_are_too_many(
    builder: PromptBuilder, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "REMEMBERED", 2)
    for image, calls in ((A, 1), (B, 2), (A, 2), (C, 3), (A, 3), (B, 4)):
        builder.build([image, "Well?"])
        assert counting.calls == calls


def test_an_image_asked_about_twice_is_seen_once(opened: Open) -> None:
    ll = opened("qwen2_5_vl")
    for question in ("What?", "Why?"):
        for policy in ("reprefill", "full-reuse", "first-k:4"):
            ll.ask(["See", A, question], policy=policy, max_tokens=1)
    assert ll.linker.counters.vision_calls == 1


def test_another_setting_of_the_processor_is_another_content(adapter_of: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of("qwen2_5_vl")
    before = only_chunk(PromptBuilder(adapter).build([A, "x"]))
    monkeypatch.setattr(adapter.processor.image_processor, "image_mean", [0.1, 0.2, 0.3])
    after = only_chunk(PromptBuilder(adapter).build([A, "x"]))
    assert after.ids == before.ids
    assert after.content != before.content


def test_a_chunks_content_does_not_depend_on_the_prompt(builder: PromptBuilder) -> None:
    alone = only_chunk(builder.build([A])).content
    assert only_chunk(builder.build([SYSTEM, Message("user", ("x", A, "y"))], start_pos=7)).content == alone
    assert builder.build([B, A]).chunks[1].chunk.content == alone  # type: ignore[union-attr]
    assert only_chunk(builder.build([C, "x"])).content != alone


def test_many_threads_build_the_same_prompts(adapter_of: Load) -> None:
    builder = PromptBuilder(adapter_of("qwen2_5_vl"))
    images = [Image(picture(56 + 28 * (number % 3), 56, number)) for number in range(6)]

    def make(number: int) -> tuple[int, ...]:
        return builder.build([f"number {number % 6}", images[number % 6], Document("page"), "?"]).ids

    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(make, range(48)))
    assert made == [make(number) for number in range(48)]


@pytest.mark.parametrize("family", VISUAL)
@pytest.mark.parametrize("size", [(1, 1), (2, 3), (1, 150), (3000, 20)], ids=str)
def test_small_and_narrow_images_are_taken(opened: Open, family: str, size: tuple[int, int]) -> None:
    ll = opened(family)
    assert ll.ask([Image(PILImages.new("RGB", size, "red")), "Well?"], max_tokens=1).token_ids


@pytest.mark.parametrize("family", VISUAL)
@pytest.mark.parametrize("size", [(1, 300), (5000, 2)], ids=str)
def test_an_image_a_family_cannot_take_is_a_media_error(
    adapter_of: Load, family: str, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    with contextlib.suppress(MediaError):
        PromptBuilder(adapter_of(family)).build([Image(PILImages.new("RGB", size, "red")), "Well?"])


def test_a_prompt_may_fill_the_model_to_the_last_token(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(builder.build(["Hello", A]))
    monkeypatch.setattr(builder.adapter, "max_length", size + 5)
    assert builder.build(["Hello", A], max_tokens=5)
    with pytest.raises(LimitError, match=f"{size} tokens and may be answered with 6; .* takes {size + 5} in all"):
        builder.build(["Hello", A], max_tokens=6)


@pytest.mark.parametrize("start_pos", [-1, 10**9])
def test_a_start_position_lies_within_the_model(builder: PromptBuilder, start_pos: int) -> None:
    with pytest.raises((ConfigError, LimitError), match="start_pos"):
        builder.build("Hello", start_pos=start_pos)


def test_text_models_take_text_and_documents_only(adapter_of: Load) -> None:
    for family in TEXT_ONLY:
        builder = PromptBuilder(adapter_of(family))
        with pytest.raises(PromptError, match="is a text model: it takes text and Documents, no Image"):
            builder.build([A, "Well?"])
        with pytest.raises(PromptError, match="no Clip"):
            builder.build([Clip([A]), "Well?"])
        assert builder.build([Document("A page."), "Well?"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_canonical_context_is_the_templates_own_beginning(adapter_of: Load, family: str) -> None:
    builder = PromptBuilder(adapter_of(family))
    page = builder.build([Document("A page."), "Well?"])
    before = page.ids[: page.chunks[0].start]
    if family == "smolvlm":  # writes a space in front of words and none in front of an image
        before = before[:-1]
    assert before == builder.canonical.ids
    assert "A page" not in adapter_of(family).tokenizer.decode(builder.canonical.ids)
    nothing = PromptBuilder(adapter_of(family), canonical="none").canonical
    assert nothing.ids == ()
    assert nothing.identity != builder.canonical.identity
    with pytest.raises(ConfigError, match="'preamble' or 'none', got 'some'"):
        PromptBuilder(adapter_of(family), canonical="some")


@pytest.mark.parametrize("family", VISUAL)
def test_an_image_that_comes_first_stands_behind_the_canonical_context(adapter_of: Load, family: str) -> None:
    builder = PromptBuilder(adapter_of(family))
    built = builder.build([A, "Well?"])
    assert built.ids[: built.chunks[0].start] == builder.canonical.ids


def frames(count: int, width: int = 112, height: int = 112) -> list[Image]:
    return [Image(picture(width, height, 100 + number)) for number in range(count)]


def test_a_clip_reaches_beyond_what_follows_it(adapter_of: Load) -> None:
    """DESIGN §2: a 10-step 4×4 clip at 2 reaches 20, the next text starts at 6, the first decoded token is at 21."""
    adapter = adapter_of("qwen2_5_vl")
    builder = PromptBuilder(adapter, canonical="none")
    assert adapter.model.config.vision_config.tokens_per_second == 4
    chunk = only_chunk(builder.build([Clip(frames(20), seconds_per_frame=0.25), "x"]))
    start, *visual, end = range(len(chunk))
    assert len(visual) == 10 * 4 * 4
    positions = chunk.placement.positions + 1  # its opening mark stands at 1, the clip itself at 2
    assert positions[:, start].tolist() == [1, 1, 1]
    assert int(positions[:, visual].min()) == 2
    assert int(positions.max()) == 20
    assert positions[:, end].tolist() == [6, 6, 6]
    assert assemble([(7,), chunk, (8, 9)], axes=3).next_pos == 21
    assert assemble([(7,), chunk, tuple(range(30))], axes=3).next_pos == 6 + 1 + 30, "long texts overtake the clip"


@pytest.mark.parametrize("family", CLIPS)
@pytest.mark.parametrize(("count", "seconds"), [(20, 0.25), (8, 0.5), (7, 0.3), (3, 1.7), (2, 0.01), (1, 0.5)])
def test_clips_stand_where_the_model_puts_them(adapter_of: Load, family: str, count: int, seconds: float) -> None:
    adapter = adapter_of(family)
    builder = PromptBuilder(adapter)
    clip = Clip(frames(count), seconds_per_frame=seconds)
    built = builder.build(["Before", clip, "between", B, Clip(frames(4, 56, 84), seconds), "behind"])
    assert kinds(built) == ["text", "clip", "text", "image", "clip", "text"]
    first = built.chunks[0].chunk
    assert first is not None
    assert len(first.visual) == -(-count // 2) * 16
    assert torch.equal(built.positions, own_positions(adapter, built))
    assert built.next_pos == int(built.positions.max()) + 1


@pytest.mark.parametrize("family", CLIPS)
def test_clip_tokens_are_what_the_template_writes_for_a_video(adapter_of: Load, family: str) -> None:
    adapter = adapter_of(family)
    turns = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What happens?"}]}]
    rendered = adapter.processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    mark = adapter.processor.video_token
    expected = adapter.tokenizer(rendered.replace(mark, mark * 32))["input_ids"]
    assert list(PromptBuilder(adapter).build([Clip(frames(4)), "What happens?"]).ids) == expected


@pytest.mark.parametrize("family", CLIPS)
@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_a_clip_of_equal_frames_is_cut_as_the_image_processor_cuts_one(
    adapter_of: Load, family: str, count: int
) -> None:
    chunk = only_chunk(PromptBuilder(adapter_of(family)).build([Clip([B] * count), "x"]))
    still = only_chunk(PromptBuilder(adapter_of(family)).build([B, "x"]))
    steps, height, width = chunk.inputs["video_grid_thw"][0].tolist()
    assert [1, height, width] == still.inputs["image_grid_thw"][0].tolist()
    assert steps == -(-count // 2)
    one = still.inputs["pixel_values"]
    assert torch.equal(chunk.inputs["pixel_values_videos"].view(steps, *one.shape), one.expand(steps, -1, -1))


@pytest.mark.parametrize("family", CLIPS)
def test_frames_are_paired_in_order_and_an_odd_last_one_is_shown_twice(adapter_of: Load, family: str) -> None:
    builder = PromptBuilder(adapter_of(family))
    one, two, three = frames(3)

    def pixels(*given: Image) -> torch.Tensor:
        return only_chunk(builder.build([Clip(given), "x"])).inputs["pixel_values_videos"]

    odd = pixels(one, two, three)
    assert torch.equal(odd, torch.cat((pixels(one, two), pixels(three, three))))
    assert torch.equal(odd, pixels(one, two, three, three))
    assert not torch.equal(pixels(one, two), pixels(two, one))


@pytest.mark.parametrize("family", CLIPS)
@pytest.mark.parametrize(("count", "seconds"), [(8, 0.5), (5, 1.3)])
def test_a_stock_forward_with_the_video_equals_ours(
    adapter_of: Load, opened: Open, family: str, count: int, seconds: float
) -> None:
    adapter, ll = adapter_of(family), opened(family)
    built = ll.builder.build(["Watch", Clip(frames(count), seconds), "and", B, "then tell."])
    ids = torch.tensor([built.ids])
    marks = torch.zeros_like(ids, dtype=torch.int)
    marks[ids == adapter.image_token_id] = 1
    marks[ids == adapter.video_token_id] = 2
    with stock_attention(adapter.decoder), torch.inference_mode():
        own = adapter.model(input_ids=ids, mm_token_type_ids=marks, **joined(built.chunks)).logits[0, -1]
    assert error(ll.reference.ours(built, Reprefill()), own) < 1e-5
    other = ll.builder.build(["Watch", Clip(frames(count)[::-1], seconds), "and", B, "then tell."])
    assert error(ll.reference.ours(other, Reprefill()), own) > 1e-3, "another order of frames must show"
    assert error(ll.reference.ours(built, FullReuse()), own) > 1e-3, "blind reuse is not exact"


def test_the_pace_of_a_clip_is_part_of_its_content(builder: PromptBuilder) -> None:
    def content(clip: Clip) -> str:
        return only_chunk(builder.build([clip, "x"])).content

    assert content(Clip(frames(4), 0.5)) == content(Clip(tuple(frames(4)), 0.5)) == content(Clip(frames(4)))
    assert content(Clip(frames(4), 1)) == content(Clip(frames(4), 1.0))
    others = [Clip(frames(4), 0.25), Clip(frames(4)[::-1]), Clip(frames(3)), Clip(frames(2) * 2)]
    assert len({content(one) for one in [Clip(frames(4)), *others]}) == 5
    still = only_chunk(builder.build([frames(1)[0], "x"])).content
    assert content(Clip(frames(1))) != still


def test_a_known_clip_is_not_cut_again(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    cut = build_module.clip_inputs
    monkeypatch.setattr(build_module, "clip_inputs", lambda *given: calls.append(1) or cut(*given))
    first = only_chunk(builder.build([Clip(frames(4)), "x"]))
    again = only_chunk(builder.build(["Other", Clip(frames(4)), "words"]))
    assert len(calls) == 1
    assert torch.equal(again.inputs["pixel_values_videos"], first.inputs["pixel_values_videos"])
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("clip", "says"),
    [
        (Clip([]), "no frames"),
        (Clip(frames(2), 0), "seconds_per_frame must be > 0, got 0"),
        (Clip(frames(2), -1), "seconds_per_frame must be between 0 and"),
        (Clip([A, B]), r"one size, got .*112, 112.*224, 168"),
        (Clip([Image(b"none"), A]), "not an image"),
        pytest.param(Clip(frames(4), float("nan")), "seconds_per_frame"),
        pytest.param(Clip(frames(4), float("inf")), "seconds_per_frame"),
        pytest.param(Clip(frames(4), 1e12), "seconds_per_frame"),
        pytest.param(Clip(frames(2), "slow"), "seconds_per_frame"),  # type: ignore[arg-type]
        pytest.param(Clip(A), "frames"),  # type: ignore[arg-type]
    ],
)
def test_a_clip_that_makes_no_sense_is_refused(builder: PromptBuilder, clip: Clip, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        builder.build([clip, "Well?"])


def test_frames_may_be_pictures_too(builder: PromptBuilder) -> None:
    bare = Clip([frame.source for frame in frames(2)])  # type: ignore[misc]
    assert only_chunk(builder.build([bare, "x"])).content == only_chunk(builder.build([Clip(frames(2)), "x"])).content


@pytest.mark.parametrize("family", [family for family in VISUAL if family not in CLIPS])
def test_families_without_clips_say_what_to_do(adapter_of: Load, family: str) -> None:
    with pytest.raises(PromptError, match="takes no clips; give the frames as images with their times as text"):
        PromptBuilder(adapter_of(family)).build([Clip(frames(2)), "Well?"])


def test_processor_settings_are_plain_text(builder: PromptBuilder) -> None:
    kind, facts = builder._settings.split(" ", 1)
    assert "ImageProcessor" in kind
    assert json.loads(facts)["patch_size"] == 14
