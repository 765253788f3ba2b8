"""Messages → one tokenised prompt with its chunks.

The chat template is rendered once with placeholders and tokenised once; each placeholder is then replaced by the tokens
the family's own processor gives that image alone. Placeholders are special tokens, so this equals tokenising the
expanded text (tested for every family). Documents are tokenised alone and spliced in. What a chunk's tokens are and
where they stand is remembered by content, so a known image is neither resized nor cut into patches again.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from PIL.Image import Image as PILImage
from torch import Tensor

from looseleaf.checks import check_number, check_whole
from looseleaf.errors import ConfigError, LimitError, MediaError, PromptError
from looseleaf.identity import digest
from looseleaf.model.adapter import Adapter
from looseleaf.prompt.chunks import Canonical, Chunk, Prompt, assemble
from looseleaf.prompt.clips import clip_inputs
from looseleaf.prompt.media import MediaLimits, Picture, read_picture
from looseleaf.prompt.segments import Clip, Document, Image, Message, PromptLike, as_messages

CANONICALS = ("preamble", "none")
"""What chunks may be computed behind."""
REMEMBERED = 4096
"""Chunk shapes (tokens and positions, no pixels) kept by content."""

MARK = "\u241e{}\u241e"
"""Stands for a document or clip while the template is rendered; the symbol for a record separator."""


class PromptBuilder:
    """Builds prompts for one model. Safe to use from several threads."""

    def __init__(self, adapter: Adapter, *, limits: MediaLimits | None = None, canonical: str = "preamble"):
        if canonical not in CANONICALS:
            raise ConfigError(f"canonical must be {' or '.join(map(repr, CANONICALS))}, got {canonical!r}")
        self.adapter = adapter
        self.limits = limits or MediaLimits()
        self._canonical = canonical
        self._shapes: OrderedDict[str, Chunk] = OrderedDict()
        self._lock = threading.Lock()

    def build(self, prompt: PromptLike, *, start_pos: int = 0, max_tokens: int = 0) -> Prompt:
        """A prompt ready to be planned. Raises PromptError, MediaError or LimitError with what to do."""
        check_whole("start_pos", start_pos, low=0)
        messages = as_messages(prompt)
        segments = [one for message in messages for one in message.content if not isinstance(one, str)]
        several = self.adapter.family.fewer_among_others and sum(isinstance(one, Image) for one in segments) > 1
        chunks = [self._chunk(one, several) for one in segments]
        pieces = self._splice(self.render(messages), chunks)
        built = assemble(pieces, axes=self.adapter.axes, start_pos=start_pos)
        self.check_length(built, max_tokens)
        return built

    def check_length(self, built: Prompt, max_tokens: int) -> None:
        """Raise LimitError where a prompt and its answer are longer than the model takes."""
        start_pos = built.spans[0].start_pos
        if start_pos + len(built) + max_tokens > self.adapter.max_length:
            where = f" from start_pos {start_pos:,} on" if start_pos else ""
            raise LimitError(
                f"the prompt has {len(built):,} tokens and may be answered with {max_tokens:,}; {self.adapter.name} "
                f"takes {self.adapter.max_length:,} in all{where}. Shorten the prompt, use fewer images or lower "
                "max_tokens"
            )

    @cached_property
    def canonical(self) -> Canonical:
        """The fixed preamble chunks are computed behind: the template up to where the first user's content starts."""
        if self._canonical == "none":
            return Canonical(ids=())
        if self.adapter.sees_images:  # templates may set off text from an image (SmolVLM writes no space there)
            mark = self.adapter.family.wrap[0] + self.adapter.processor.image_token
            rendered = self.render((Message("user", (Image(b""),)),))
        else:
            mark = MARK.format(0)
            rendered = self.render((Message("user", (Document(""),)),))
        head, found, _ = rendered.partition(mark)
        if not found:
            raise PromptError("the chat template drops user content; pass canonical='none' to cache chunks without it")
        return Canonical(ids=tuple(self._tokenise(head, first=True)))

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template's text: image placeholders in place, documents and clips as marks."""
        marks = iter(range(10**6))
        turns = []
        for message in messages:
            parts: list[dict[str, str]] = []
            for _, run in itertools.groupby(message.content, key=lambda one: isinstance(one, str)):
                self._refuse_markers("".join(one for one in run if isinstance(one, str)), MARK[0])
            for segment in message.content:
                if isinstance(segment, str):
                    parts.append({"type": "text", "text": segment})
                elif isinstance(segment, Image):
                    parts.append({"type": "image"})
                else:
                    parts.append({"type": "text", "text": MARK.format(next(marks))})
            turns.append({"role": message.role, "content": parts})
        if not self.adapter.sees_images:
            turns = [{"role": turn["role"], "content": "".join(p["text"] for p in turn["content"])} for turn in turns]  # type: ignore[index]
        template = getattr(self.adapter.processor, "chat_template", None) or self.adapter.tokenizer.chat_template
        if not template:
            return "".join(str(turn["content"]) for turn in turns)
        return self.adapter.tokenizer.apply_chat_template(
            turns, chat_template=template, add_generation_prompt=True, tokenize=False
        )

    def _refuse_markers(self, text: str, *ours: str) -> None:
        markers = [getattr(self.adapter.processor, name, None) for name in ("image_token", "video_token")]
        for marker in (*markers, *ours):
            if marker and marker in text:
                raise PromptError(f"the text contains {marker!r}, which stands for an image or document; leave it out")

    def _splice(self, rendered: str, chunks: Sequence[Chunk]) -> list[tuple[int, ...] | Chunk]:
        """Tokenise the rendered text and put chunks where their placeholders and marks stand."""
        images = [chunk for chunk in chunks if chunk.kind == "image"]
        others = [chunk for chunk in chunks if chunk.kind != "image"]
        pieces: list[tuple[int, ...] | Chunk] = []
        waiting = iter(images)
        for number, text in enumerate(_split_marks(rendered, len(others))):
            if number:
                pieces.append(others[number - 1])
            self._place_images(self._tokenise(text, first=number == 0), waiting, pieces)
        if next(waiting, None) is not None:
            raise PromptError(f"the chat template of {self.adapter.name} shows fewer images than the prompt has")
        return pieces

    def _place_images(self, ids: list[int], waiting: Any, pieces: list[tuple[int, ...] | Chunk]) -> None:
        before, after = self._wrap
        text: list[int] = []
        at = 0
        while at < len(ids):
            if ids[at] != self.adapter.image_token_id:
                text.append(ids[at])
                at += 1
                continue
            chunk = next(waiting, None)
            if chunk is None:
                raise PromptError("the text shows more images than the prompt has; leave image markers out of it")
            if before and tuple(text[-len(before) :]) == before and tuple(ids[at + 1 : at + 1 + len(after)]) == after:
                del text[-len(before) :]
                at += len(after)
            pieces += [tuple(text), chunk]
            text = []
            at += 1
        pieces.append(tuple(text))

    @cached_property
    def _wrap(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        before, after = (self._tokenise(text, first=False) for text in self.adapter.family.wrap)
        return tuple(before), tuple(after)

    def _tokenise(self, text: str, *, first: bool) -> list[int]:
        """Ids of rendered text; what a tokenizer adds in front (BOS) goes in front of the prompt, once.

        Text that goes on behind something is tokenised behind a special token, which is then taken away: tokenizers
        that open a text with a space would put one into the middle of the prompt.
        """
        tokenizer = self.adapter.tokenizer
        if not first:
            ids: list[int] = tokenizer((tokenizer.eos_token or "") + text, add_special_tokens=False)["input_ids"]
            behind = bool(ids) and tokenizer.eos_token is not None and ids[0] == tokenizer.eos_token_id
            return ids[1:] if behind else tokenizer(text, add_special_tokens=False)["input_ids"]
        bos = tokenizer.bos_token
        special = not (bos and text.startswith(bos))
        ids = tokenizer(text, add_special_tokens=special)["input_ids"]
        if special and ids and ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            ids = ids[:-1]
        return ids

    def _chunk(self, segment: Image | Document | Clip, several: bool) -> Chunk:
        if isinstance(segment, Document):
            if not segment.text:
                raise PromptError("a Document is empty")
            self._refuse_markers(segment.text)
            ids = tuple(self._tokenise(segment.text, first=False))
            content = digest("document", ids=ids)
            return Chunk(kind="document", content=content, ids=ids, placement=self.adapter.place(torch.tensor(ids)))
        if not self.adapter.sees_images:
            raise PromptError(
                f"{self.adapter.name} is a text model: it takes text and Documents, no {type(segment).__name__}"
            )
        if isinstance(segment, Clip):
            return self._clip(segment)
        picture = read_picture(segment, self.limits)
        content = digest("picture", pixels=picture.content, several=several, processor=self._settings)
        return self._remembered(content, "image", lambda: self._process(picture, several))

    def _clip(self, clip: Clip) -> Chunk:
        if not self.adapter.family.clips:
            raise PromptError(f"{self.adapter.name} takes no clips; give the frames as images with their times as text")
        check_number("a Clip's seconds_per_frame", clip.seconds_per_frame, low=0, high=86_400, error=PromptError)
        if clip.seconds_per_frame == 0:
            raise PromptError("a Clip's seconds_per_frame must be > 0, got 0")
        if not isinstance(clip.frames, Sequence) or not clip.frames:
            raise PromptError("a Clip has no frames: give it a list of Images")
        shown = [Image(frame) if isinstance(frame, PILImage) else frame for frame in clip.frames]
        frames = [read_picture(frame, self.limits) for frame in shown]
        seconds = float(clip.seconds_per_frame)
        content = digest("clip", frames=[frame.content for frame in frames], seconds=seconds, processor=self._settings)
        return self._remembered(content, "clip", lambda: clip_inputs(self.adapter, [f.pixels for f in frames], seconds))

    def _remembered(self, content: str, kind: str, process: Any) -> Chunk:
        """A chunk by content. Only its shape is remembered; pixels are made again when features must be computed."""
        with self._lock:
            known = self._shapes.get(content)
            if known is not None:
                self._shapes.move_to_end(content)
        if known is not None:
            return Chunk(
                kind=known.kind, content=known.content, ids=known.ids, placement=known.placement, visual=known.visual,
                inputs=LazyInputs(process),
            )  # fmt: skip
        ids, inputs = process()
        marker = self.adapter.video_token_id if kind == "clip" else self.adapter.image_token_id
        chunk = Chunk(
            kind=kind, content=digest("chunk", content=content, ids=ids), ids=ids,
            placement=self.adapter.place(torch.tensor(ids), inputs),
            visual=tuple(at for at, one in enumerate(ids) if one == marker), inputs=inputs,
        )  # fmt: skip
        with self._lock:
            self._shapes[content] = Chunk(
                kind=kind, content=chunk.content, ids=ids, placement=chunk.placement, visual=chunk.visual
            )
            while len(self._shapes) > REMEMBERED:
                self._shapes.popitem(last=False)
        return chunk

    def _process(self, picture: Picture, several: bool) -> tuple[tuple[int, ...], dict[str, Tensor]]:
        """Run the family's processor on one image: its tokens with what stands around them, and the tower's inputs.

        To see the form an image has among others, the processor is shown it twice, and half of what comes out is kept.
        """
        processor = self.adapter.processor
        before, after = self.adapter.family.wrap
        text = f"{before}{processor.image_token}{after}"
        try:
            out = processor(
                text=[text * 2] if several else [text],
                images=[[picture.pixels] * 2] if several else [picture.pixels],
                return_tensors="pt",
                add_special_tokens=False,
            )
        except Exception as error:  # each family has limits of its own, such as an aspect ratio
            size = "x".join(map(str, picture.pixels.size))
            raise MediaError(f"{self.adapter.name} cannot take an image of {size} pixels: {error}") from error
        ids = out.pop("input_ids")[0].tolist()
        inputs = {name: value for name, value in out.items() if name not in ("attention_mask", "mm_token_type_ids")}
        if several:
            ids = ids[: len(ids) // 2]
            inputs = {name: one if name == "batch_num_images" else one[:1] for name, one in inputs.items()}
        return tuple(ids), inputs

    @cached_property
    def _settings(self) -> str:
        """The processor's settings, as text: another setting is another content."""
        image = self.adapter.processor.image_processor
        facts = {key: value for key, value in image.to_dict().items() if not key.startswith("_")}
        return f"{type(image).__name__} {json.dumps(facts, sort_keys=True, default=str)}"


class LazyInputs(Mapping[str, Tensor]):
    """A vision tower's inputs, made when first asked for."""

    def __init__(self, process: Any):
        self._process = process
        self._made: dict[str, Tensor] | None = None

    @property
    def made(self) -> Mapping[str, Tensor]:
        """Those that were asked for already."""
        return self._made or {}

    def _inputs(self) -> dict[str, Tensor]:
        if self._made is None:
            self._made = self._process()[1]
        return self._made

    def __getitem__(self, name: str) -> Tensor:
        return self._inputs()[name]

    def __iter__(self) -> Any:
        return iter(self._inputs())

    def __len__(self) -> int:
        return len(self._inputs())


def _split_marks(text: str, count: int) -> list[str]:
    parts = []
    for number in range(count):
        head, mark, text = text.partition(MARK.format(number))
        if not mark:
            raise PromptError("the chat template dropped a document")
        parts.append(head)
    return [*parts, text]
