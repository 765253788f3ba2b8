"""What every bench prints: a table for people and, as its last line, one JSON object for programs."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from looseleaf.checks import check_whole


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What a bench may be told."""

    models: tuple[str, ...] = ()
    """None named: the bench's own."""
    device: str = "cpu"
    seed: int = 0
    quick: bool = False
    plot: Path | None = None
    count: int | None = None
    """Items of a cell, where a bench counts items."""
    analyse: Path | None = None
    """Where to draw the shape of what reuse loses, in the bench that measures it."""
    dtype: str | None = None
    """None: the bench's own."""
    workers: int = 1
    """Processes that share the questions, where a bench asks questions."""

    def __post_init__(self) -> None:
        check_whole("--workers", self.workers, low=1)
        if self.count is not None:
            check_whole("--count", self.count, low=1)

    @property
    def model(self) -> str | None:
        """The models named, in one word."""
        return ",".join(self.models) or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """How many of how many, with Wilson's 95 % interval."""

    right: int
    n: int

    @property
    def value(self) -> float:
        return self.right / self.n if self.n else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """From, to."""
        if not self.n:
            return 0.0, 1.0
        z = 1.96
        middle = (self.right + z * z / 2) / (self.n + z * z)
        half = z / (self.n + z * z) * math.sqrt(self.right * (self.n - self.right) / self.n + z * z / 4)
        return max(0.0, min(self.value, middle - half)), min(1.0, max(self.value, middle + half))

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.2f} ({low:.2f}–{high:.2f})"


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """A table for people."""
    _wide().print(_table(rows))


def _wide() -> Console:
    return Console(width=int(os.environ.get("COLUMNS", "160")), highlight=False)


@dataclass(kw_only=True)
class Report:
    """Rows and a summary; prints itself."""

    bench: str
    options: BenchOptions
    rows: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Curves and the like: for programs only."""

    def print(self) -> None:
        """The table, the summary, then the JSON line."""
        console = _wide()
        if self.rows:
            console.print(_table(self.rows))
        for key, value in self.summary.items():
            console.print(f"{key}: {_show(value)}", soft_wrap=True)
        print(self.json())

    def json(self) -> str:
        """One line: what was asked, on what, and what came out."""
        return json.dumps(
            {
                "bench": self.bench,
                "commit": commit(),
                "hardware": hardware(self.options.device),
                "model": self.options.model,
                "seed": self.options.seed,
                "quick": self.options.quick,
                "rows": self.rows,
                "summary": self.summary,
                **({"details": self.details} if self.details else {}),
            }
        )


def commit() -> str:
    """The commit the code is at, with a + when files differ from it; a copy without history says LOOSELEAF_COMMIT."""
    here = Path(__file__).parent
    try:
        head = _git(here, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("LOOSELEAF_COMMIT", "unknown")


def hardware(device: str) -> str:
    """The processor in words, and the versions that matter for speed."""
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
    else:
        model = ""
        info = Path("/proc/cpuinfo")
        if info.exists():
            lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
            model = lines[0].partition(":")[2].strip() if lines else ""
        name = f"{model or platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    return f"{name}; torch {torch.__version__}"


def _git(where: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(where), *words], capture_output=True, text=True, check=True).stdout.strip()


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="left" if isinstance(rows[0].get(column), str) else "right")
    for row in rows:
        table.add_row(*(_show(row.get(column)) for column in columns))
    return table


def _show(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e-2 or abs(value) >= 1e4 else f"{value:.3f}".rstrip("0").rstrip(".")
    if isinstance(value, dict):
        return ", ".join(f"{key} {_show(one)}" for key, one in value.items())
    return str(value)
