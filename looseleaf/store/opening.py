"""A store by its address: `memory://`, or a folder (a path, or `file://` and a path) with memory in front of it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

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
    """The folder an address names."""
    if address.startswith("file://"):
        parts = urlsplit(address)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ConfigError(f"store {address!r} names another machine: use file:///path/to/folder, or the path alone")
        return Path(unquote(parts.path))
    if "://" in address or not address:
        raise ConfigError(f"unknown store {address!r}: use {MEMORY} or the path of a folder")
    return Path(address).expanduser()
