"""The models a bench asks questions of: those it was told, or all that are embedded, one open at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from looseleaf.bench.report import BenchOptions
from looseleaf.errors import ConfigError
from looseleaf.model.embedded import embedded_models
from looseleaf.system import Looseleaf

DTYPE = "float32"
"""In bf16 the two likeliest tokens of an undecided answer often tie to the last bit, and rounding alone flips it."""


def each_model(options: BenchOptions, tell: Callable[[str], None]) -> Iterator[tuple[str, Looseleaf]]:
    """Names and open models."""
    sources = options.models or embedded_models()
    if not sources:
        raise ConfigError("there is no embedded model here; name one with --model")
    for source in sources:
        opened = f"embedded:{source}" if source in embedded_models() else source
        with Looseleaf.open(opened, device=options.device, dtype=options.dtype or DTYPE, tell=tell) as ll:
            yield Path(source).name, ll
