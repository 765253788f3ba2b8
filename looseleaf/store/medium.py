"""Files as a disk store reads and writes them, with a seam for media that are slow or fail.

`RatedMedium` and `FaultyMedium` stand in for those, in benches and tests. What this file does not know: records.
"""

from __future__ import annotations

import errno
import io
import os
import time
from pathlib import Path
from random import Random
from typing import Any, BinaryIO

SLOW_S = 0.005


class Medium:
    """The file system. `durable`: whether to wait until the medium has it."""

    def __init__(self, *, durable: bool = True):
        self.durable = durable

    def reading(self, path: Path) -> BinaryIO:
        """An open file, on its way into memory; once open it stays readable, whoever removes it."""
        file = path.open("rb", buffering=0)
        if hasattr(os, "posix_fadvise"):  # the medium goes on while checksums are compared
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
        return file

    def writing(self, path: Path) -> BinaryIO:
        """A new file."""
        return path.open("wb")

    def flush(self, file: BinaryIO) -> None:
        """All that was written is on the medium."""
        file.flush()
        if self.durable:
            os.fsync(file.fileno())

    def rename(self, path: Path, to: Path) -> None:
        """Put a finished file in its place, at once or not at all."""
        path.rename(to)
        self.flush_folder(to.parent)

    def flush_folder(self, folder: Path) -> None:
        """Its list of files is on the medium."""
        if self.durable:
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


class RatedMedium(Medium):
    """A medium that reads so many bytes a second and no more: a slow disk or network, the same on every machine."""

    def __init__(self, bytes_per_s: float, *, durable: bool = True):
        super().__init__(durable=durable)
        self.bytes_per_s = bytes_per_s

    def reading(self, path: Path) -> BinaryIO:
        return _Rated(path, self.bytes_per_s)


class _Rated(io.FileIO):
    """Waits after every piece as long as a slow medium would have taken for it."""

    def __init__(self, path: Path, bytes_per_s: float):
        super().__init__(path, "rb")
        self._bytes_per_s = bytes_per_s
        self._until = time.perf_counter()

    def readinto(self, room: Any) -> int | None:
        count = super().readinto(room)
        self._until += (count or 0) / self._bytes_per_s
        time.sleep(max(0.0, self._until - time.perf_counter()))
        return count


READ_FAULTS = ("read refused", "read corrupted", "read cut short", "read dropped", "read delayed")
WRITE_FAULTS = ("out of space", "partial write", "flush refused", "rename refused", "write delayed")


class FaultyMedium(Medium):
    """A medium that fails when it was told to."""

    def __init__(self, *, seed: int = 0, durable: bool = False):
        super().__init__(durable=durable)
        self._chance = Random(seed)
        self._armed: list[str] = []

    def arm(self, fault: str) -> None:
        """The next operation this fault can happen to, suffers it."""
        assert fault in (*READ_FAULTS, *WRITE_FAULTS), fault
        self._armed.append(fault)

    def reading(self, path: Path) -> BinaryIO:
        fault = self._fault(READ_FAULTS)
        if fault == "read refused":
            raise OSError(errno.EIO, "Input/output error")
        if fault == "read dropped":
            raise FileNotFoundError(path)
        if fault == "read delayed":
            time.sleep(SLOW_S)
        file = super().reading(path)
        if fault not in ("read corrupted", "read cut short"):
            return file
        with file:
            data = bytearray(file.read())
        if fault == "read cut short":
            return io.BytesIO(bytes(data[: self._chance.randrange(len(data))]))
        data[self._chance.randrange(len(data))] ^= 1 << self._chance.randrange(8)
        return io.BytesIO(bytes(data))

    def writing(self, path: Path) -> BinaryIO:
        fault = self._fault(("out of space", "partial write", "write delayed"))
        if fault == "out of space":
            raise OSError(errno.ENOSPC, "No space left on device")
        if fault == "write delayed":
            time.sleep(SLOW_S)
        return _Partial(path, self._chance.randrange(900)) if fault == "partial write" else super().writing(path)

    def flush(self, file: BinaryIO) -> None:
        if self._fault(("flush refused",)):
            raise OSError(errno.EIO, "Input/output error")
        super().flush(file)

    def rename(self, path: Path, to: Path) -> None:
        if self._fault(("rename refused",)):
            raise OSError(errno.EROFS, "Read-only file system")
        super().rename(path, to)

    def _fault(self, possible: tuple[str, ...]) -> str | None:
        fault = next((one for one in self._armed if one in possible), None)
        if fault is not None:
            self._armed.remove(fault)
        return fault


class _Partial(io.FileIO):
    """Takes some bytes, then there is no space left."""

    def __init__(self, path: Path, room: int):
        super().__init__(path, "wb")
        self._room = room

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if size > self._room:
            super().write(memoryview(data).cast("B")[: self._room])
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= size
        return super().write(data)
