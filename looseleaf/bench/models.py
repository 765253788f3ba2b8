"""The models a bench asks questions of, one after the other: those it was told, or all that are embedded.

With several workers the questions are spread over processes, each with the model open: a model that is small for its
GPU spends its time waiting for Python, and many wait together.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue
from typing import TypeVar

import torch
import transformers

from looseleaf.bench.cases import Asking
from looseleaf.bench.report import BenchOptions
from looseleaf.errors import ConfigError
from looseleaf.model.embedded import embedded_models
from looseleaf.system import Looseleaf

DTYPE = "float32"
"""In bf16 the two likeliest tokens of an undecided answer often tie to the last bit, and rounding alone flips it."""

T = TypeVar("T")


def ask_each(
    options: BenchOptions, count: int, ask: Callable[[Looseleaf, Asking], list[T]], tell: Callable[[str], None]
) -> Iterator[tuple[str, list[T]]]:
    """Names of models, and what `ask` brought of each. With workers, `ask` and what it brings must pickle."""
    sources = options.models or embedded_models()
    if not sources:
        raise ConfigError("there is no embedded model here; name one with --model")
    for source in sources:
        name = Path(source).name
        opened = f"embedded:{source}" if source in embedded_models() else source
        asking = Asking(count=count, seed=options.seed, tell=_aloud(name, tell))
        yield name, _spread(opened, options, ask, asking) if options.workers > 1 else _ask(opened, options, ask, asking)


def _aloud(name: str, tell: Callable[[str], None]) -> Callable[[str], None]:
    """Tells which model it is about."""
    return lambda stage: tell(f"{name}: {stage}")


def _ask(source: str, options: BenchOptions, ask: Callable[[Looseleaf, Asking], list[T]], asking: Asking) -> list[T]:
    with Looseleaf.open(source, device=options.device, dtype=options.dtype or DTYPE, tell=asking.tell) as ll:
        return ask(ll, asking)


def _spread(source: str, options: BenchOptions, ask: Callable[[Looseleaf, Asking], list[T]], asking: Asking) -> list[T]:
    """All parts, each in a process of its own."""
    spawning = multiprocessing.get_context("spawn")
    with spawning.Manager() as manager, ProcessPoolExecutor(options.workers, mp_context=spawning) as pool:
        told = manager.Queue()
        parts = [replace(asking, part=part, of=options.workers, tell=told.put) for part in range(options.workers)]
        waiting = {pool.submit(_work, source, options, ask, part) for part in parts}
        futures = list(waiting)
        try:
            while waiting:
                _pass_on(told, asking.tell)
                done, waiting = wait(waiting, timeout=0.2, return_when="FIRST_EXCEPTION")
                for one in done:
                    one.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [outcome for one in futures for outcome in one.result()]


def _pass_on(told: Queue[str], tell: Callable[[str], None]) -> None:
    """The latest that any worker told."""
    latest = None
    try:
        while True:
            latest = told.get_nowait()
    except Empty:
        if latest is not None:
            tell(latest)


def _work(source: str, options: BenchOptions, ask: Callable[[Looseleaf, Asking], list[T]], asking: Asking) -> list[T]:
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    return _ask(source, options, ask, asking)
