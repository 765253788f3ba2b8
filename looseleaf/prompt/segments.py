"""What a prompt is made of, as a caller writes it: words, images, documents, clips, in messages.

Only the caller's side: sources are named here and read in `prompt/media.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from PIL.Image import Image as PILImage

from looseleaf.errors import PromptError

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Image:
    """An image: a path, encoded bytes, a `data:` URL or a PIL image."""

    source: str | os.PathLike[str] | bytes | PILImage


@dataclass(frozen=True)
class Document:
    """A text document, reusable as a whole: tokenised alone, stored like an image."""

    text: str


@dataclass(frozen=True)
class Clip:
    """A short clip: frames in order and the seconds from one frame to the next."""

    frames: Sequence[Image]
    seconds_per_frame: float = 0.5


Segment: TypeAlias = str | Image | Document | Clip


@dataclass(frozen=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: tuple[Segment, ...]


PromptLike: TypeAlias = str | Sequence[Segment | Message | Mapping[str, Any]]


def as_messages(prompt: PromptLike) -> tuple[Message, ...]:
    """A prompt in any accepted form as messages; a bare list of segments is one user message."""
    if isinstance(prompt, str):
        prompt = [prompt]
    items = list(prompt)
    if not items:
        raise PromptError("the prompt is empty: give at least one segment, for instance a question")
    if all(isinstance(item, Message | Mapping) for item in items):
        messages = tuple(_message(item) for item in items)
    else:
        messages = (Message("user", tuple(_segment(item) for item in items)),)
    _check(messages)
    return messages


def _message(item: Any) -> Message:
    if isinstance(item, Message):
        return item
    unknown = set(item) - {"role", "content"}
    if unknown or "role" not in item or "content" not in item:
        raise PromptError(f"a message has the keys role and content, got {sorted(item)}")
    content = item["content"]
    parts = [content] if isinstance(content, str) else content
    return Message(item["role"], tuple(_segment(part) for part in parts))


def _segment(part: Any) -> Segment:
    """A segment, or one of OpenAI's content parts, or a bare PIL image."""
    if isinstance(part, str | Image | Document | Clip):
        return part
    if isinstance(part, PILImage):
        return Image(part)
    if isinstance(part, Mapping):
        kind = part.get("type")
        if kind == "text":
            return str(part["text"])
        if kind == "image_url":
            url = part["image_url"]
            return Image(url["url"] if isinstance(url, Mapping) else url)
        if kind == "image":
            return Image(part["image"])
        raise PromptError(f"a content part of type {kind!r} is unknown; use text, image or image_url")
    raise PromptError(
        f"a prompt segment is text, Image, Document or Clip, got {type(part).__name__}; wrap image files as Image(path)"
    )


def _check(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.role not in ROLES:
            raise PromptError(f"a message's role is one of {', '.join(ROLES)}, got {message.role!r}")
    if messages[-1].role != "user":
        raise PromptError(f"the last message must be the user's, got role {messages[-1].role!r}")
    content = messages[-1].content
    if not any(not isinstance(segment, str) or segment.strip() for segment in content):
        raise PromptError("the last user message is empty: give at least a question or an image")
