"""Reading images under limits: path, bytes, data URL or PIL image → decoded RGB pixels and their digest.

The digest is over what the model will see (size and pixels), not over the file: the same picture saved twice is one
content. Remote URLs are not fetched here.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from dataclasses import dataclass
from pathlib import Path

import PIL.Image
import PIL.ImageOps
from PIL.Image import Image as PILImage

from looseleaf.errors import ConfigError, LimitError, MediaError
from looseleaf.identity import digest
from looseleaf.prompt.segments import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """What one piece of media may cost."""

    max_pixels: int = 50_000_000
    max_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for name in ("max_pixels", "max_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"media.{name} must be >= 1, got {getattr(self, name)}")


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
        pixels = PIL.ImageOps.exif_transpose(opened).convert("RGB")
    except Exception as error:  # decoders raise whatever they like on damaged data
        raise MediaError(f"{name} cannot be decoded ({error}); is the file complete?") from error
    return Picture(pixels=pixels, content=digest("image", size=pixels.size, rgb=pixels.tobytes()))


def _name(source: object) -> str:
    if isinstance(source, PILImage):
        return "the PIL image"
    if isinstance(source, bytes):
        return f"the image of {len(source)} bytes"
    text = os.fspath(source) if isinstance(source, os.PathLike) else str(source)
    return f"image {text[:60]!r}" + ("…" if len(text) > 60 else "")


def _read_bytes(source: str | os.PathLike[str] | bytes, name: str, limits: MediaLimits) -> bytes:
    if isinstance(source, bytes):
        data = source
    elif isinstance(source, str) and source.startswith("data:"):
        data = _decode_data_url(source, name)
    elif isinstance(source, str) and source.startswith(("http://", "https://")):
        raise MediaError(f"{name}: remote URLs are not fetched; pass the file, its bytes or a data: URL")
    else:
        path = Path(source)
        try:
            if path.stat().st_size > limits.max_bytes:
                raise LimitError(f"{name} has {path.stat().st_size:,} bytes; the limit is {limits.max_bytes:,}")
            data = path.read_bytes()
        except OSError as error:
            raise MediaError(f"{name} cannot be read: {error.strerror or error}") from error
    if len(data) > limits.max_bytes:
        raise LimitError(f"{name} has {len(data):,} bytes; the limit is {limits.max_bytes:,}")
    return data


def _decode_data_url(url: str, name: str) -> bytes:
    header, comma, body = url.partition(",")
    if not comma or not header.endswith(";base64"):
        raise MediaError(f"{name}: a data URL looks like data:image/png;base64,…")
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise MediaError(f"{name}: the data URL's base64 is damaged ({error})") from error


def _open(data: bytes, name: str) -> PILImage:
    try:
        return PIL.Image.open(io.BytesIO(data))
    except PIL.Image.DecompressionBombError as error:
        raise LimitError(f"{name} is a decompression bomb: {error}") from error
    except Exception as error:
        raise MediaError(f"{name} is not an image we can decode ({error})") from error
