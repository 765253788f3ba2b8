"""What a prompt is made of, as a caller writes it: words, images, documents, clips, in messages.

Only the caller's side: sources are named here and read in `prompt/media.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeAlias

from PIL.Image import Image as PILImage

from looseleaf.errors import PromptError

ROLES = ("system", "user", "assistant")
URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)


@dataclass(frozen=True)
class Image:
    """An image: a path, encoded bytes, a `data:` URL, an open file or a PIL image."""

    source: str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes] | PILImage


@dataclass(frozen=True)
class Document:
    """A text document, reusable as a whole: tokenised alone, stored like an image."""

    text: str


@dataclass(frozen=True)
class Clip:
    """A short clip: frames in order and the seconds from one frame to the next."""

    frames: Sequence[Image | PILImage]
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
    if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
        raise PromptError(f"a prompt is text, a list of segments or a list of messages, got {type(prompt).__name__}")
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
        return Message(item.role, _content(item.content))
    if set(item) != {"role", "content"}:
        raise PromptError(f"a message has the keys role and content, got {sorted(map(str, item))}")
    return Message(item["role"], _content(item["content"]))


def _content(content: Any) -> tuple[Segment, ...]:
    if isinstance(content, str | Image | Document | Clip | PILImage):
        return (_segment(content),)
    if content is None or isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise PromptError(f"a message's content is text or a list of parts, got {type(content).__name__}")
    return tuple(_segment(part) for part in content)


def _segment(part: Any) -> Segment:
    """A segment, or one of OpenAI's content parts, or a bare PIL image."""
    if isinstance(part, str):
        return _text(part, "text")
    if isinstance(part, Document):
        return Document(_text(part.text, "a Document"))
    if isinstance(part, Image | Clip):
        return part
    if isinstance(part, PILImage):
        return Image(part)
    if isinstance(part, Mapping):
        return _part(part)
    raise PromptError(
        f"a prompt segment is text, Image, Document or Clip, got {type(part).__name__}; wrap image files as Image(path)"
    )


def _part(part: Mapping[Any, Any]) -> Segment:
    kind = part.get("type")
    if kind == "text":
        return _text(part.get("text"), "a part of type text")
    if kind == "image" and part.get("image") is not None:
        return Image(part["image"])
    if kind == "image_url":
        given = part.get("image_url")
        url = given.get("url") if isinstance(given, Mapping) else given
        if isinstance(url, str) and URL.match(url):  # never a path: whoever sends a prompt may not read our files
            return Image(url)
        raise PromptError(f"a part of type image_url needs an image_url with a data: URL, got {str(given)[:60]!r}")
    if kind == "image":
        raise PromptError("a part of type image needs an image")
    raise PromptError(f"a content part of type {kind!r} is unknown; use text, image or image_url")


def _text(text: Any, what: str) -> str:
    if not isinstance(text, str):
        raise PromptError(f"{what} needs text, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{what} holds half a character at {error.start}; decode it with errors='replace'") from error
    return text


def _check(messages: Sequence[Message]) -> None:
    for message in messages:
        if message.role not in ROLES:
            raise PromptError(f"a message's role is one of {', '.join(ROLES)}, got {message.role!r}")
    if messages[-1].role != "user":
        raise PromptError(f"the last message must be the user's, got role {messages[-1].role!r}")
    content = messages[-1].content
    if not any(not isinstance(segment, str) or segment.strip() for segment in content):
        raise PromptError("the last user message is empty: give at least a question or an image")
