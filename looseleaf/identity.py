"""Content identity: a SHA-256 over typed, labelled fields.

Takes plain values, returns a hex digest. It knows nothing of models or stores; every structure keyed by content
(features, chunk records, prefixes) is keyed by a digest from here. Fields are length-prefixed and carry their type and
label, so that two different sets of fields never feed the hash the same bytes. Nothing is truncated.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Field: TypeAlias = "bool | int | float | str | bytes | Sequence[Field] | Mapping[str, Field] | None"


def digest(kind: str, **fields: Field) -> str:
    """The identity of a thing of this `kind` with these fields, independent of their order."""
    sha = hashlib.sha256()
    _feed(sha, kind)
    _feed(sha, fields)
    return sha.hexdigest()


def _feed(sha: hashlib._Hash, value: Field) -> None:
    if value is None:
        sha.update(b"n")
    elif isinstance(value, bool):
        sha.update(b"b1" if value else b"b0")
    elif isinstance(value, int):
        _feed_bytes(sha, b"i", str(value).encode())
    elif isinstance(value, float):
        sha.update(b"f" + struct.pack("<d", value))
    elif isinstance(value, str):
        _feed_bytes(sha, b"s", value.encode())
    elif isinstance(value, bytes | bytearray | memoryview):
        _feed_bytes(sha, b"y", value)
    elif isinstance(value, Mapping):
        sha.update(b"m" + struct.pack("<Q", len(value)))
        for label in sorted(value):
            _feed(sha, label)
            _feed(sha, value[label])
    elif isinstance(value, Sequence):
        sha.update(b"l" + struct.pack("<Q", len(value)))
        for item in value:
            _feed(sha, item)
    else:
        raise TypeError(f"identity fields are plain values, got {type(value).__name__}")


def _feed_bytes(sha: hashlib._Hash, tag: bytes, data: bytes | bytearray | memoryview) -> None:
    sha.update(tag + struct.pack("<Q", memoryview(data).nbytes))
    sha.update(data)
