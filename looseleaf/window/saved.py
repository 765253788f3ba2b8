"""Windows on disk: a folder with one JSON file, pictures as PNG and kept rows as safetensors.

Pixels are kept as they were decoded, so that a reopened page has the identity it had and finds what is stored for it.
Rows belong to one model, dtype and canonical context; for any other they are left out and computed again. Files are
named by their SHA-256, so that a save that does not end leaves the one before it whole. Rows read from a file serve the
window and count as approximate: nothing is published from them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save

from looseleaf.errors import ConfigError, MediaError
from looseleaf.kv.layout import KVRows
from looseleaf.link.held import Conditioned
from looseleaf.link.policies import Policy, parse_policy, policy_name
from looseleaf.link.records import Antecedent
from looseleaf.prompt.media import read_picture
from looseleaf.prompt.segments import Clip, Document, Image, Segment
from looseleaf.system import Looseleaf
from looseleaf.window.page import Page

log = logging.getLogger(__name__)

FILE, VERSION = "window.json", 1


def save_pages(
    folder: Path, ll: Looseleaf, inside: Sequence[Page], outside: Sequence[Page],
    budgets: dict[str, int | None], policy: Policy,
) -> None:  # fmt: skip
    """Write a window, its list of pages last, then let go of files of an earlier one."""
    folder.mkdir(parents=True, exist_ok=True)
    told: dict[str, Any] = {
        "version": VERSION, "model": _identity(ll), "policy": policy_name(policy), **budgets,
        "pages": [_write(folder, ll, page) for page in inside],
        "evicted": [_write(folder, ll, page) for page in outside],
    }  # fmt: skip
    waiting = folder / f"{FILE}.new"
    waiting.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    waiting.replace(folder / FILE)
    named = {name for page in (*told["pages"], *told["evicted"]) for name in _files(page)}
    for path in folder.iterdir():
        if path.suffix in (".png", ".safetensors") and len(path.stem) == 64 and path.name not in named:
            path.unlink()


def open_pages(folder: Path, ll: Looseleaf) -> tuple[list[Page], list[Page], dict[str, int | None], Policy]:
    """Read a window; its pages' tokens are for the model to count."""
    try:
        told: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        if told["version"] != VERSION:
            raise ConfigError(f"{folder} holds a window of version {told['version']}; this looseleaf reads {VERSION}")
        same = told["model"] == _identity(ll)
        if not same:
            log.warning("%s was saved with another model, dtype or preamble: its rows are computed again", folder)
        inside = [_read(folder, ll, one, rows=same) for one in told["pages"]]
        outside = [_read(folder, ll, one, rows=False) for one in told["evicted"]]
        budgets = {name: told[name] for name in ("budget_tokens", "budget_bytes")}
        return inside, outside, budgets, parse_policy(told["policy"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder} does not hold a window that can be read: {error!r}") from error


def _identity(ll: Looseleaf) -> list[str]:
    layout = ll.adapter.layout.describe()
    return [ll.adapter.fingerprint, layout, ll.builder.canonical.identity]


def _write(folder: Path, ll: Looseleaf, page: Page) -> dict[str, Any]:
    segment = page.segment
    told: dict[str, Any] = {"number": page.number, "clean": page.clean, "lacks": sorted(page.lacks)}
    if isinstance(segment, str):
        told["words"] = segment
    elif isinstance(segment, Document):
        told["document"] = segment.text
    elif isinstance(segment, Image):
        told["image"] = _picture(folder, ll, segment)
    else:
        frames = [frame if isinstance(frame, Image) else Image(frame) for frame in segment.frames]
        told["frames"] = [_picture(folder, ll, frame) for frame in frames]
        told["seconds_per_frame"] = segment.seconds_per_frame
    if page.kept is not None:
        planes = {"keys": page.kept.rows.keys, "values": page.kept.rows.values}
        tensors = {f"{what}.{layer}": one.contiguous().cpu() for what, each in planes.items()
                   for layer, one in enumerate(each)}  # fmt: skip
        told["kept"] = {
            "file": _put(folder, save(tensors), ".safetensors"), "content": page.kept.content,
            "antecedent": list(page.kept.antecedent),
        }  # fmt: skip
    return told


def _files(told: dict[str, Any]) -> list[str]:
    """The files a page names."""
    return [*([told["image"]] if "image" in told else told.get("frames", [])),
            *([told["kept"]["file"]] if "kept" in told else [])]  # fmt: skip


def _picture(folder: Path, ll: Looseleaf, image: Image) -> str:
    data = io.BytesIO()
    read_picture(image, ll.builder.limits).pixels.save(data, "PNG")
    return _put(folder, data.getvalue(), ".png")


def _put(folder: Path, data: bytes, suffix: str) -> str:
    """Write a file named by its SHA-256, unless it is there."""
    name = hashlib.sha256(data).hexdigest() + suffix
    path = folder / name
    if not path.exists():
        waiting = folder / f"{name}.new"
        waiting.write_bytes(data)
        waiting.replace(path)
    return name


def _read(folder: Path, ll: Looseleaf, told: dict[str, Any], *, rows: bool) -> Page:
    segment: Segment
    if type(told["number"]) is not int or type(told["clean"]) is not bool:
        raise ValueError(f"a page's number is {told['number']!r}")
    if "words" in told:
        segment = str(told["words"])
    elif "document" in told:
        segment = Document(str(told["document"]))
    elif "image" in told:
        segment = _opened(folder, ll, told["image"])
    else:
        segment = Clip([_opened(folder, ll, one) for one in told["frames"]], told["seconds_per_frame"])
    kept = _rows(folder, ll, told["kept"]) if rows and told.get("kept") else None
    return Page(
        number=told["number"], segment=segment, tokens=0, kept=kept, clean=told["clean"],
        lacks=frozenset(told["lacks"]),
    )  # fmt: skip


def _path(folder: Path, name: str) -> Path:
    """A file of the folder itself: a list of pages that names others reads none of them."""
    path = folder / Path(name).name
    if path.is_symlink():
        raise MediaError(f"{path} is a link, not a file of the window")
    return path


def _opened(folder: Path, ll: Looseleaf, name: str) -> Image:
    return Image(read_picture(Image(_path(folder, name)), ll.builder.limits).pixels)


def _rows(folder: Path, ll: Looseleaf, told: dict[str, Any]) -> Conditioned | None:
    """Kept rows; None where their file is damaged, which costs computing them again."""
    adapter, path = ll.adapter, _path(folder, told["file"])
    try:
        data = path.read_bytes()
        if hashlib.sha256(data).hexdigest() != path.stem:
            raise ValueError("its checksum is another")
        tensors = load(data)
        layers = range(len(adapter.layout.layers))
        keys, values = ([tensors[f"{what}.{layer}"] for layer in layers] for what in ("keys", "values"))
        rows = KVRows(adapter.layout, keys[0].shape[1], adapter.device)
        for mine, read in zip((*rows.keys, *rows.values), (*keys, *values), strict=True):
            if mine.shape != read.shape or mine.dtype != read.dtype:
                raise ValueError(f"a plane is {tuple(read.shape)} {read.dtype}, not {tuple(mine.shape)} {mine.dtype}")
            mine.copy_(read)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        log.warning("%s is damaged and left out: %r", path, error)
        return None
    exact, chunks = told["antecedent"]
    antecedent = Antecedent(exact=exact, chunks=tuple(chunks))
    return Conditioned(rows=rows, content=told["content"], antecedent=antecedent, exact=False)
