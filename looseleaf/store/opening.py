"""A store by its address: `memory://`, or a folder (a path, or `file://` and a path) with memory in front of it."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

import torch

from looseleaf.errors import ConfigError
from looseleaf.store.disk import DiskStore
from looseleaf.store.memory import MemoryStore
from looseleaf.store.protocol import Store
from looseleaf.store.tiered import TieredStore

MEMORY = "memory://"


def open_store(address: str, *, memory_bytes: int, disk_bytes: int, device: torch.device | str = "cpu") -> Store:
    """The store at an address; records come out on `device`."""
    memory = MemoryStore(memory_bytes)
    if address == MEMORY:
        return memory
    return TieredStore(memory, DiskStore(folder_of(address), disk_bytes, device=device))


def folder_of(address: str) -> Path:
    """The folder an address names; ConfigError where it names none."""
    local = address.removeprefix("file://localhost") if address.startswith("file://localhost/") else address
    if local.startswith("file://"):
        local = unquote(local.removeprefix("file://"))
        if not local.startswith("/"):
            raise ConfigError(f"store {address!r} names another machine: use file:///path/to/folder, or the path alone")
    if not local or "\0" in local or re.match(r"[a-z0-9+.-]+://|memory:", local):
        raise ConfigError(f"unknown store {address!r}: use {MEMORY} or the path of a folder")
    try:
        return Path(local).expanduser()
    except RuntimeError as error:  # ~nobody
        raise ConfigError(f"store {address!r} names no folder: {error}") from error
