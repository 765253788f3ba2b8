"""Reading images under limits: path, bytes, data URL or PIL image → decoded RGB pixels and their digest.

The digest is over what the model will see (size and pixels), not over the file: the same picture saved twice is one
content. Remote URLs are not fetched here.
"""

from __future__ import annotations

import base64
import io
import os
import stat
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageOps
from PIL.Image import Image as PILImage

from looseleaf.checks import check_whole
from looseleaf.errors import LimitError, MediaError
from looseleaf.identity import digest
from looseleaf.prompt.segments import URL, Image


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """What one piece of media may cost."""

    max_pixels: int = 50_000_000
    max_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_bytes"):
            check_whole(f"media.{name}", getattr(self, name), low=1)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Decoded pixels, upright, RGB, and the digest of what they show."""

    pixels: PILImage
    content: str


def read_picture(image: Image, limits: MediaLimits) -> Picture:
    """Decode an image within limits. Every failure is a MediaError or LimitError that names the source."""
    source = image.source
    name = _name(source)
    opened = source if isinstance(source, PILImage) else _open(_read_bytes(source, name, limits), name)
    width, height = opened.size
    if width < 1 or height < 1:
        raise MediaError(f"{name} is {width}x{height} pixels: an image needs at least one pixel")
    if width * height > limits.max_pixels:
        raise LimitError(
            f"{name} has {width * height:,} pixels ({width}x{height}); the limit is {limits.max_pixels:,}. "
            "Scale it down or raise media.max_pixels"
        )
    try:
        pixels = _as_rgb(PIL.ImageOps.exif_transpose(opened))
    except Exception as error:  # decoders raise whatever they like on damaged data
        raise MediaError(f"{name} cannot be decoded ({error}); is the file complete?") from error
    return Picture(pixels=pixels, content=digest("image", size=pixels.size, rgb=pixels.tobytes()))


def _as_rgb(picture: PILImage) -> PILImage:
    if picture.mode.startswith("I;16"):  # convert() would clip all but the darkest shades
        shades = np.asarray(picture).astype(np.uint16) >> 8
        picture = PIL.Image.fromarray(shades.astype(np.uint8))
    return picture.convert("RGB")


def _name(source: object) -> str:
    if isinstance(source, PILImage):
        return "the PIL image"
    if isinstance(source, bytes | bytearray | memoryview):
        return f"the image of {len(source)} bytes"
    if not isinstance(source, str | os.PathLike):
        return f"the image from a {type(source).__name__}"
    text = os.fspath(source)
    return f"image {text[:60]!r}" + ("…" if len(text) > 60 else "")


def _read_bytes(source: Any, name: str, limits: MediaLimits) -> bytes:
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data = _decode_data_url(source, name)
    elif isinstance(source, str) and URL.match(source):
        raise MediaError(f"{name}: remote URLs are not fetched; pass the file, its bytes or a data: URL")
    elif isinstance(source, str | os.PathLike):
        data = _read_file(Path(source), name, limits)
    elif hasattr(source, "read"):
        data = source.read(limits.max_bytes + 1)
        if not isinstance(data, bytes):
            raise MediaError(f"{name}: the file must be opened for reading bytes")
        if source.seekable():
            source.seek(-len(data), os.SEEK_CUR)  # a prompt may be read twice, for a plan and for an answer
    else:
        raise MediaError(f"{name}: an Image takes a path, bytes, a data: URL, an open file or a PIL image")
    if len(data) > limits.max_bytes:
        raise LimitError(f"{name} has {len(data):,} bytes; the limit is {limits.max_bytes:,}")
    return data


def _read_file(path: Path, name: str, limits: MediaLimits) -> bytes:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode) and not stat.S_ISDIR(facts.st_mode):
            raise MediaError(f"{name} is not a file: pipes and devices are not read")
        if facts.st_size > limits.max_bytes:
            raise LimitError(f"{name} has {facts.st_size:,} bytes; the limit is {limits.max_bytes:,}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise MediaError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _decode_data_url(url: str, name: str) -> bytes:
    header, comma, body = url.partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise MediaError(f"{name}: a data URL looks like data:image/png;base64,…")
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except ValueError as error:
        raise MediaError(f"{name}: the data URL's base64 is damaged ({error})") from error


_PIL_LIMIT = threading.Lock()


def _open(data: bytes, name: str) -> PILImage:
    """Read an image's head. Our own limit on pixels holds, not PIL's, which is set aside for that moment."""
    with _PIL_LIMIT:
        before, PIL.Image.MAX_IMAGE_PIXELS = PIL.Image.MAX_IMAGE_PIXELS, None
        try:
            return PIL.Image.open(io.BytesIO(data))
        except PIL.UnidentifiedImageError:
            raise MediaError(f"{name} is not an image in a format we know") from None
        except Exception as error:
            raise MediaError(f"{name} is not an image we can decode ({error})") from error
        finally:
            PIL.Image.MAX_IMAGE_PIXELS = before
