"""What is going on, told on stderr once it takes longer than a second."""

from __future__ import annotations

import threading
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Doing:
    """Says on stderr what is going on, once it takes longer than a second."""

    def __init__(self, console: Console):
        self._console = console
        self._stage = ""
        self._status: Status | None = None
        self._timer: threading.Timer | None = None

    def __call__(self, stage: str) -> None:
        """A new stage began."""
        self.stop()
        self._stage = stage
        self._timer = threading.Timer(1.0, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        if self._console.is_terminal:
            self._status = self._console.status(f"{self._stage} …")
            self._status.start()
        else:
            self._console.print(f"{self._stage} …")

    def stop(self) -> None:
        """Nothing is going on any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def __enter__(self) -> Doing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
