"""One record, one file: a safetensors file with a manifest in its metadata and a checksum for every block of layers.

In: a key and a record. Out: a file's bytes, and back. docs/format.md specifies it for other programs. A reader gets the
record that was written under this very key, or `DamagedError`: nothing of a file is used before its checksum was
compared. What this file does not know: where files lie, and when they go.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from looseleaf.kv.layout import KVLayout, KVRows
from looseleaf.kv.records import ChunkKV, Factors, Features, Frame, Patch, Pointer, Record, SequenceKV, States
from looseleaf.store.protocol import Key

VERSION = "1"
MOST_HEADER = 16 * 2**20
"""Bytes of a header at most: a length beyond is damage, and nobody allocates for it."""
DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8",
}  # fmt: skip
BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
KINDS: Mapping[type[Any], str] = {
    ChunkKV: "chunk-kv", SequenceKV: "sequence-kv", Features: "features", States: "states", Patch: "patch",
    Pointer: "pointer",
}  # fmt: skip
FRAMES = {"chunk-kv": Frame.UNROTATED, "sequence-kv": Frame.PLACED, "patch": Frame.UNROTATED}
MOST_LAYERS = 10_000
LARGE_PAGE, LARGE_ROOM = 2**21, 2**24
"""Bytes of a large page, and of a room from which on it is made of them: less than an eighth is wasted."""
UNSIGNED = "0" * 32
"""What stands for the header's checksum while it is taken."""


class DamagedError(Exception):
    """The file is not what was written under this key. Never leaves the store."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a file says of itself."""

    key: Key
    kind: str
    facts: Mapping[str, Any]
    checksums: Mapping[str, str]
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    """dtype, shape, first and last byte behind the header; in the order they lie."""
    data_bytes: int
    size_bytes: int
    """What it counts for."""
    created_s: float
    expires_s: float | None

    def blocks(self) -> Iterator[tuple[str, int, int]]:
        """Names of the blocks, and where each begins and ends behind the header."""
        for block, names in groupby(self.tensors, key=block_of):
            places = [self.tensors[name] for name in names]
            yield block, places[0][2], places[-1][3]


def block_of(name: str) -> str:
    """Which block a tensor belongs to: a layer's number, or its own name."""
    return name.partition(".")[0]


def write(file: BinaryIO, key: Key, record: Record, *, created_s: float, expires_s: float | None = None) -> int:
    """Write a record under a key; the number of bytes written."""
    facts, tensors = _take_apart(record)
    flat = {name: _bytes_of(tensor) for name, tensor in tensors.items()}
    checksums: dict[str, Any] = {}
    for block, names in groupby(flat, key=block_of):
        taken = xxhash.xxh3_128()
        for name in names:
            taken.update(flat[name])
        checksums[block] = taken.hexdigest()
    described: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        stop = at + len(flat[name])
        described[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, stop]}
        at = stop
    manifest = {
        "looseleaf": VERSION, "identity": key.identity, "part": key.part, "kind": kind_of(record),
        "facts": json.dumps(facts), "checksums": json.dumps(checksums), "size_bytes": str(size_of(record)),
        "created_s": repr(created_s),
        "expires_s": "" if expires_s is None else repr(expires_s), "header": UNSIGNED,
    }  # fmt: skip
    header = json.dumps({"__metadata__": manifest, **described}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    header = header.replace(
        f'"header":"{UNSIGNED}"'.encode(), f'"header":"{xxhash.xxh3_128_hexdigest(header)}"'.encode(), 1
    )
    file.write(len(header).to_bytes(8, "little"))
    file.write(header)
    for part in flat.values():
        file.write(part)
    return 8 + len(header) + at


def read_manifest(file: BinaryIO) -> Manifest:
    """The header, checked; the file then stands behind it."""
    first = bytearray(8)
    if not _read_into(file, memoryview(first)):
        raise DamagedError("there is no header")
    length = int.from_bytes(first, "little")
    if not 2 <= length <= MOST_HEADER:
        raise DamagedError(f"a header of {length} bytes")
    room = bytearray(length)
    if not _read_into(file, memoryview(room)):
        raise DamagedError("the header ends early")
    header = bytes(room)
    signed = re.search(rb'"header":"([0-9a-f]{32})"', header)
    plain = b"" if signed is None else header.replace(signed[0], f'"header":"{UNSIGNED}"'.encode(), 1)
    if signed is None or not _fits(plain, signed[1].decode()):
        raise DamagedError("the header's checksum differs")
    try:
        manifest = _parse(json.loads(header))
    except Exception as error:  # whatever a forger thinks of
        raise DamagedError(f"the header cannot be understood: {error!r}") from error
    behind = file.seek(0, io.SEEK_END) - 8 - length
    if behind != manifest.data_bytes:
        raise DamagedError(
            "the last block ends early" if behind < manifest.data_bytes else "something follows the last"
        )
    file.seek(8 + length)
    return manifest


def read(file: BinaryIO, key: Key, *, device: torch.device | str = "cpu") -> tuple[Record, Manifest]:
    """The record written under `key`, on a device: one buffer, read block by block, each compared before the next."""
    manifest = read_manifest(file)
    if manifest.key != key:
        raise DamagedError(f"it holds {manifest.key.part} of {manifest.key.identity}")
    data = _room(manifest.data_bytes, pinned=torch.device(device).type == "cuda")
    room = data.numpy().data
    for block, start, stop in manifest.blocks():
        if not _read_into(file, room[start:stop]):
            raise DamagedError(f"block {block} ends early")
        if not _fits(room[start:stop], manifest.checksums.get(block)):
            raise DamagedError(f"the checksum of block {block} differs")
    whole = data.to(device)
    tensors = {
        name: whole[start:stop].view(dtype).view(shape)
        for name, (dtype, shape, start, stop) in manifest.tensors.items()
    }
    try:
        return _put_together(manifest, tensors), manifest
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DamagedError(f"it is no {manifest.kind}: {error!r}") from error


def _read_into(file: BinaryIO, room: memoryview) -> bool:
    """Fill a room; False where the file ends before. One read of a system takes 2 GiB at most, or fewer."""
    at = 0
    while at < len(room):
        got = file.readinto(room[at:])  # type: ignore[attr-defined]
        if not got:
            return False
        at += got
    return True


def _room(size_bytes: int, *, pinned: bool) -> Tensor:
    """Memory to read into. A large room asks for large pages: touching fresh small ones is most of a read's time."""
    if pinned or size_bytes < LARGE_ROOM:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    held = mmap.mmap(-1, -(-size_bytes // LARGE_PAGE) * LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # where there are none
        held.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(held, dtype=torch.uint8, count=size_bytes)


def _fits(data: bytes | memoryview, checksum: str | None) -> bool:
    return xxhash.xxh3_128_hexdigest(data) == checksum


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data


def _parse(header: dict[str, Any]) -> Manifest:
    said = header.pop("__metadata__")
    if said["looseleaf"] != VERSION:
        raise ValueError(f"format {said['looseleaf']!r}, this reads {VERSION}")
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
    at = 0
    for name, about in header.items():
        dtype, shape, (start, stop) = BY_NAME[about["dtype"]], tuple(about["shape"]), about["data_offsets"]
        if not all(type(one) is int and 0 <= one < 2**48 for one in (*shape, start, stop)):
            raise ValueError(f"{name} has a shape or place that is none")
        if start != at or stop - start != math.prod(shape) * dtype.itemsize or start % dtype.itemsize:
            raise ValueError(f"{name} does not lie where it should")
        tensors[name] = (dtype, shape, start, stop)
        at = stop
    return Manifest(
        key=Key(said["identity"], said["part"]), kind=said["kind"], facts=json.loads(said["facts"]),
        checksums=dict(json.loads(said["checksums"])), tensors=tensors, data_bytes=at,
        size_bytes=max(at, int(said["size_bytes"])), created_s=float(said["created_s"]),
        expires_s=float(said["expires_s"]) if said["expires_s"] else None,
    )  # fmt: skip


def size_of(record: Record) -> int:
    """What a record's file counts for: its tensors, those shared with others too."""
    _, tensors = _take_apart(record)
    return sum(one.nbytes for one in tensors.values()) or record.nbytes


def kind_of(record: Record) -> str:
    """What a file of this record calls it."""
    return KINDS[type(record)]


def _take_apart(record: Record) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts and tensors of a record, in the order they are written."""
    match record:
        case ChunkKV() | SequenceKV():
            rows = record.rows
            planes = zip(rows.keys, rows.values, strict=True)
            tensors = {
                f"{layer:03d}.{name}": plane
                for layer, both in enumerate(planes)
                for name, plane in zip(("keys", "values"), both, strict=True)
            }
            return {"layout": rows.layout.describe(), "frame": record.frame.value}, tensors
        case Features():
            deep = {f"deep{number:03d}": one for number, one in enumerate(record.deep)}
            return {}, {"embeddings": record.embeddings, **deep}
        case States():
            return {"layer": record.layer}, {"hidden": record.hidden}
        case Patch():
            tensors = {
                f"{layer:03d}.{name}.{side}": getattr(factors, side)
                for layer, both in enumerate(zip(record.keys, record.values, strict=True))
                for name, factors in zip(("keys", "values"), both, strict=True)
                if factors is not None
                for side in ("left", "right")
            }
            return {"layers": len(record.keys), "frame": record.frame.value}, tensors
        case Pointer():
            return {"to": record.identity}, {}
    raise TypeError(f"{type(record).__name__} is no record")


def _put_together(manifest: Manifest, tensors: Mapping[str, Tensor]) -> Record:
    facts = manifest.facts
    frame = FRAMES.get(manifest.kind)
    if frame is not None and facts["frame"] != frame:
        raise ValueError(f"its frame is {facts['frame']!r}")
    match manifest.kind:
        case "chunk-kv" | "sequence-kv":
            layout = KVLayout.parse(facts["layout"])
            keys, values = (
                [tensors[f"{layer:03d}.{name}"] for layer in range(len(layout.layers))] for name in ("keys", "values")
            )
            for layer, key, value in zip(layout.layers, keys, values, strict=True):
                for plane, tensor in ((layer.keys, key), (layer.values, value)):
                    if tensor.shape != (plane.heads, keys[0].shape[1], plane.dim) or tensor.dtype != layout.dtype:
                        raise ValueError("a plane is not as the layout says")
            if len(tensors) != 2 * len(layout.layers):
                raise ValueError("there are more planes than layers")
            rows = KVRows.of_views(layout, keys, values)
            return ChunkKV(rows=rows) if manifest.kind == "chunk-kv" else SequenceKV(rows=rows)
        case "features":
            deep = tuple(tensors[name] for name in tensors if name != "embeddings")
            return Features(embeddings=tensors["embeddings"], deep=deep)
        case "states":
            return States(layer=facts["layer"], hidden=tensors["hidden"])
        case "patch":

            def factors(layer: int, name: str) -> Factors | None:
                left, right = (tensors.get(f"{layer:03d}.{name}.{side}") for side in ("left", "right"))
                if left is None and right is None:
                    return None
                if left is None or right is None or left.dim() != 2 or right.shape[1:] != left.shape[1:]:
                    raise ValueError(f"layer {layer} has half a patch")
                return Factors(left=left, right=right)

            if not 0 <= facts["layers"] <= MOST_LAYERS:
                raise ValueError(f"{facts['layers']} layers")
            each = ([factors(layer, name) for layer in range(facts["layers"])] for name in ("keys", "values"))
            keys_of, values_of = (tuple(one) for one in each)
            if len(tensors) != 2 * sum(one is not None for one in (*keys_of, *values_of)):
                raise ValueError("something belongs to no layer")
            return Patch(keys=keys_of, values=values_of)
        case "pointer":
            return Pointer(identity=facts["to"])
    raise ValueError(f"unknown kind {manifest.kind!r}")
