"""The models a bench asks questions of, one after the other: those it was told, or all that are embedded.

With several workers the questions are spread over processes, each with the model open: a model that is small for its
GPU spends its time waiting for Python, and many wait together.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.queues import Queue
from pathlib import Path
from queue import Empty
from typing import Any, TypeVar

import torch
import transformers

from looseleaf.bench.cases import Asking
from looseleaf.bench.report import BenchOptions
from looseleaf.config import Config
from looseleaf.errors import ConfigError, LooseleafError
from looseleaf.model.embedded import embedded_models
from looseleaf.system import Looseleaf

DTYPE = "float32"
"""In bf16 the two likeliest tokens of an undecided answer often tie to the last bit, and rounding alone flips it."""

STORE_BYTES = 2**30
"""A chunk is never asked for after its round: more would only be held."""

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
    config = Config(store_bytes=STORE_BYTES)
    dtype = options.dtype or DTYPE
    with Looseleaf.open(source, device=options.device, dtype=dtype, config=config, tell=asking.tell) as ll:
        return ask(ll, asking)


def _spread(source: str, options: BenchOptions, ask: Callable[[Looseleaf, Asking], list[T]], asking: Asking) -> list[T]:
    """All parts, each in a process of its own; whatever ends this ends them."""
    spawning, count = multiprocessing.get_context("spawn"), options.workers
    news: Queue[tuple[int, str | Exception | list[T]]] = spawning.Queue()
    parts = [replace(asking, part=part, of=count, tell=print) for part in range(count)]  # each tells through `news`
    workers = [spawning.Process(target=_work, args=(source, options, ask, part, news), daemon=True) for part in parts]
    found: dict[int, list[T]] = {}
    try:
        for worker in workers:
            worker.start()
        while len(found) < count:
            try:
                part, what = news.get(timeout=0.5)
            except Empty:
                if any(worker.exitcode for worker in workers):
                    raise LooseleafError(
                        f"one of {count} workers was killed; was there too little memory? Use fewer --workers"
                    ) from None
                continue
            if isinstance(what, str):
                asking.tell(what)
            elif isinstance(what, Exception):
                raise what
            else:
                found[part] = what
    finally:
        for worker in workers:
            if worker.pid is not None:
                worker.terminate()
                worker.join()
    return [outcome for part in range(count) for outcome in found[part]]


def _work(
    source: str, options: BenchOptions, ask: Callable[[Looseleaf, Asking], list[T]], asking: Asking, news: Queue[Any]
) -> None:
    """One part, told and brought through `news`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends this
    threading.Thread(target=_end_with_parent, daemon=True).start()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.workers))
    try:
        aloud = replace(asking, tell=lambda stage: news.put((asking.part, stage)))
        news.put((asking.part, _ask(source, options, ask, aloud)))
    except Exception as error:
        news.put((asking.part, error))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
