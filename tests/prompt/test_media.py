"""Images: every source gives the same pixels, content is what is seen, limits hold, and every failure is ours."""

from __future__ import annotations

import base64
import io
import os
import struct
import threading
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as PILImages
from PIL.Image import Image as PILImage

from looseleaf.errors import ConfigError, LimitError, MediaError
from looseleaf.prompt.media import MediaLimits, Picture, read_picture
from looseleaf.prompt.segments import Image

LIMITS = MediaLimits()


def picture(width: int = 12, height: int = 8, seed: int = 0) -> PILImage:
    return PILImages.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def encoded(image: PILImage, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def read(source: Any, limits: MediaLimits = LIMITS) -> Picture:
    return read_picture(Image(source), limits)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def png(width: int, height: int) -> bytes:
    """The head of a black-and-white PNG of this size, without its pixels."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = part(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def test_every_source_of_one_picture_is_one_content(tmp_path: Path) -> None:
    image = picture()
    data = encoded(image)
    (tmp_path / "a picture.png").write_bytes(data)
    sources = [image, data, data_url(data), tmp_path / "a picture.png", str(tmp_path / "a picture.png")]
    assert {read(source).content for source in sources} == {read(image).content}
    assert all(np.array_equal(read(source).pixels, image) for source in sources)


@pytest.mark.parametrize("form", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_the_file_does_not_matter_what_it_shows_does(form: str) -> None:
    options = {"lossless": True} if form == "WEBP" else {}
    assert read(encoded(picture(), form, **options)).content == read(picture()).content


def test_one_different_pixel_is_another_content() -> None:
    other = picture()
    other.putpixel((3, 3), (1, 2, 3))
    assert read(other).content != read(picture()).content


def test_the_same_bytes_in_another_shape_are_another_content() -> None:
    flat = bytes(range(36))
    shapes = [(12, 1), (1, 12), (6, 2), (2, 6), (4, 3), (3, 4)]
    assert len({read(PILImages.frombytes("RGB", shape, flat)).content for shape in shapes}) == 6


def test_a_picture_stands_upright_as_its_camera_says() -> None:
    exif = PILImages.Exif()
    exif[0x0112] = 6
    turned = read(encoded(picture(), exif=exif))
    assert turned.pixels.size == (8, 12)
    assert turned.content == read(picture().rotate(-90, expand=True)).content


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I", "F", "YCbCr", "HSV"])
def test_any_mode_becomes_rgb(mode: str) -> None:
    made = read(PILImages.new(mode, (5, 4)))
    assert made.pixels.mode == "RGB"
    assert made.pixels.size == (5, 4)


def test_the_first_frame_of_an_animation_is_the_picture() -> None:
    frames = [picture(seed=one).quantize(4) for one in range(3)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert read(data).content == read(frames[0].convert("RGB")).content


def test_sixteen_bit_grey_keeps_its_shades() -> None:
    deep = PILImages.fromarray(np.array([[0, 16_000, 32_000, 65_535]], dtype=np.uint16))
    shades = [red for red, _, _ in np.asarray(read(deep).pixels)[0].tolist()]
    assert shades == sorted(set(shades))
    assert 50 < shades[1] < 80


def test_reading_leaves_the_callers_picture_alone() -> None:
    image = picture().convert("RGBA")
    before = image.tobytes()
    read(image)
    assert image.mode == "RGBA"
    assert image.tobytes() == before


def test_limits_are_positive() -> None:
    for name in ("max_pixels", "max_bytes"):
        with pytest.raises(ConfigError, match=f"media.{name} must be >= 1, got 0"):
            MediaLimits(**{name: 0})


def test_pixels_are_limited_to_the_very_one() -> None:
    assert read(picture(12, 8), MediaLimits(max_pixels=96))
    with pytest.raises(
        LimitError, match=r"96 pixels \(12x8\); the limit is 95. Scale it down or raise media.max_pixels"
    ):
        read(picture(12, 8), MediaLimits(max_pixels=95))


def test_too_many_pixels_are_refused_before_they_are_decoded() -> None:
    with pytest.raises(LimitError, match="64,000,000 pixels"):
        read(png(8000, 8000))


def test_bytes_are_limited_to_the_very_one_for_every_source(tmp_path: Path) -> None:
    data = encoded(picture())
    path = tmp_path / "a.png"
    path.write_bytes(data)
    for source in (data, data_url(data), path, str(path)):
        assert read(source, MediaLimits(max_bytes=len(data)))
        with pytest.raises(LimitError, match=rf"has {len(data)} bytes; the limit is {len(data) - 1}"):
            read(source, MediaLimits(max_bytes=len(data) - 1))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.png"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(LimitError, match="1,099,511,627,776 bytes"):
        read(path)


def test_a_bomb_pil_only_warns_about_is_too_many_pixels() -> None:
    with pytest.raises(LimitError, match="100,000,000 pixels"):
        read(png(10_000, 10_000))


def test_a_bomb_pil_refuses_is_too_many_pixels() -> None:
    with pytest.raises(LimitError, match="pixels"):
        read(png(20_000, 10_000))


def test_a_raised_limit_is_the_limit() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(MediaError, match="cannot be decoded"):
            read(png(20_000, 10_000), MediaLimits(max_pixels=10**9))


BAD: dict[str, Any] = {
    "not an image": (b"these are no pixels", "cannot|not an image"),
    "nothing": (b"", "not an image"),
    "a text file as data URL": (data_url(b"hello"), "not an image"),
    "cut off": (encoded(picture(60, 60))[:200], "cannot be decoded .*is the file complete"),
    "cut off in the head": (encoded(picture())[:20], "image"),
    "damaged": (encoded(picture(60, 60))[:100] + b"\0" * 500, "image"),
    "no pixels wide": (PILImages.new("RGB", (0, 5)), "0x5 pixels: an image needs at least one pixel"),
    "no pixels high": (PILImages.new("RGB", (5, 0)), "5x0 pixels"),
    "http": ("http://example.com/a.png", "remote URLs are not fetched; pass the file, its bytes or a data: URL"),
    "https": ("https://example.com/a.png", "remote URLs are not fetched"),
    "no such file": ("/nowhere/a.png", "'/nowhere/a.png' cannot be read: No such file"),
    "an empty name": ("", "cannot be read"),
    "a folder": ("/", "cannot be read: Is a directory"),
    "a name too long": ("x" * 5000, "cannot be read: File name too long"),
    "a data URL without base64": ("data:image/png,abc", "looks like data:image/png;base64,…"),
    "a data URL without a comma": ("data:image/png;base64", "looks like data:image/png;base64,…"),
    "a data URL without a body": ("data:image/png;base64,", "not an image"),
    "damaged base64": ("data:image/png;base64,@@@@", "base64 is damaged"),
    "cut off base64": ("data:image/png;base64,abc", "base64 is damaged"),
}
BAD_LATER: dict[str, Any] = {
    "base64 with an accent": ("data:image/png;base64,é", "base64"),
    "a name with a NUL": ("a\0b.png", "cannot be read"),
    "a name with half a character": ("a\ud800.png", "cannot be read"),
    "None": (None, "path, bytes"),
    "a number": (7, "path, bytes"),
    "an array": (np.zeros((4, 4, 3), np.uint8), "path, bytes"),
}


@pytest.mark.parametrize(
    ("source", "says"),
    [*(pytest.param(*case, id=name) for name, case in BAD.items()),
     *(pytest.param(*case, id=name) for name, case in BAD_LATER.items())],
)  # fmt: skip
def test_what_cannot_be_read_is_a_media_error_that_says_why(source: Any, says: str) -> None:
    with pytest.raises(MediaError, match=says):
        read(source)


@pytest.mark.parametrize("kind", [bytearray, memoryview, io.BytesIO])
def test_other_holders_of_bytes_are_read_or_refused(kind: Any) -> None:
    try:
        made = read(kind(encoded(picture())))
    except MediaError:
        return
    assert made.content == read(picture()).content


@pytest.mark.parametrize(
    "source",
    [
        pytest.param("HTTPS://example.com/a.png", id="upper case"),
        pytest.param("ftp://example.com/a.png", id="ftp"),
        pytest.param("file:///tmp/a.png", id="file"),
    ],
)
def test_any_url_is_told_that_urls_are_not_fetched(source: str) -> None:
    with pytest.raises(MediaError, match="URL"):
        read(source)


@pytest.mark.parametrize(
    "url", ["DATA:image/png;base64,{}", "data:image/png;charset=utf-8;BASE64,{}", "data:;base64,{}\n"]
)
def test_data_urls_are_read_as_browsers_read_them(url: str) -> None:
    body = base64.b64encode(encoded(picture())).decode()
    assert read(url.format(body)).content == read(picture()).content


@pytest.mark.parametrize("source", [b"no pixels", data_url(b"hello")], ids=["bytes", "data URL"])
def test_messages_do_not_talk_of_objects_in_memory(source: Any) -> None:
    with pytest.raises(MediaError) as caught:
        read(source)
    assert "BytesIO" not in str(caught.value)


def test_long_names_are_cut_in_messages() -> None:
    with pytest.raises(MediaError) as caught:
        read("data:image/png;base64," + "A" * 10_000)
    assert len(str(caught.value)) < 400


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes here")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    caught: list[BaseException] = []

    def look() -> None:
        try:
            read(path)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(0.5)
    waited = thread.is_alive()
    if waited:
        path.open("wb").close()  # let it go
        thread.join(5)
    assert not waited
    assert isinstance(caught[0], MediaError)


def test_an_open_file_may_be_read_more_than_once() -> None:
    file = io.BytesIO(encoded(picture()))
    assert read(file).content == read(file).content == read(picture()).content
