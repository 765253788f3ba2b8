"""Fixtures every test may use: tiny models of the real classes, opened once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import transformers

from looseleaf import Config, Looseleaf
from looseleaf.model.adapter import Adapter
from looseleaf.model.loading import load_adapter
from looseleaf.model.tiny import build_tiny

transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def no_calibrations_of_mine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Calibrations that the user keeps must not decide what tests see."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def adapter_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Adapter]:
    """A tiny model by family and dtype, loaded once for all tests."""

    @cache
    def build(family: str) -> Path:
        return build_tiny(family, tmp_path_factory.mktemp("tiny") / family)

    @cache
    def load(family: str, dtype: str = "float32") -> Adapter:
        return load_adapter(build(family), dtype=dtype)

    return load


@pytest.fixture(scope="session")
def opened(adapter_of: Callable[..., Adapter]) -> Iterator[Callable[..., Looseleaf]]:
    """A Looseleaf over a tiny model, with an empty store, closed in the end."""
    made: list[Looseleaf] = []

    def make(family: str = "qwen2_5_vl", dtype: str = "float32", **config: object) -> Looseleaf:
        made.append(Looseleaf(adapter_of(family, dtype), Config(**config)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()
