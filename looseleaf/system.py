"""Looseleaf: the composition root. Builds everything from a Config; what users and servers hold.

One engine, one driver thread that steps it while there is work, and one way to wait for an answer: a Reply, which is
awaitable and iterable, in threads and in asyncio alike.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch

from looseleaf.checks import check_number, check_truth
from looseleaf.config import Config
from looseleaf.engine.engine import Engine, Job
from looseleaf.engine.request import Answer, Progress, Request, Sampling
from looseleaf.errors import ClosedError, ConfigError, PolicyError
from looseleaf.link.audit import Audit, AuditCounters
from looseleaf.link.calibration import find_calibration
from looseleaf.link.held import Held
from looseleaf.link.linker import Keep, Linker
from looseleaf.link.plan import Plan
from looseleaf.link.policies import Policy, parse_policy
from looseleaf.link.reference import Reference
from looseleaf.model.adapter import Adapter
from looseleaf.model.loading import load_adapter
from looseleaf.prompt.build import PromptBuilder
from looseleaf.prompt.chunks import Prompt
from looseleaf.prompt.segments import PromptLike, Segment
from looseleaf.store.opening import MEMORY, open_store
from looseleaf.store.protocol import StoreStats

log = logging.getLogger(__name__)

DEFAULT_MODEL = "embedded:qwen2_5_vl"

T = TypeVar("T")


class Reply:
    """An answer on its way. Wait for it with `result()` or `await`, or take its text in pieces with `for`."""

    def __init__(self, system: Looseleaf):
        self._system = system
        self._heard: list[Progress | None] = []
        self._news = threading.Condition()
        self._listeners: list[Callable[[Progress | None], None]] = []
        self._job: Job | None = None

    def _hear(self, job: Job, progress: Progress | None) -> None:
        with self._news:
            self._heard.append(progress)
            self._news.notify_all()
            for listener in self._listeners:
                listener(progress)

    @property
    def job(self) -> Job:
        """The engine's side of it."""
        assert self._job is not None
        return self._job

    def result(self, timeout_s: float | None = None) -> Answer:
        """Wait for the whole answer. Raises what ended the request, or TimeoutError while it goes on."""
        if not self.job.done.wait(timeout_s):
            raise TimeoutError(f"request {self.job.id} is not finished after {timeout_s} s")
        if self.job.error is not None:
            raise self.job.error
        assert self.job.answer is not None
        return self.job.answer

    def cancel(self) -> bool:
        """Stop it; False when it had ended already."""
        return self._system.engine.cancel(self.job)

    def progress(self) -> Follow[Progress]:
        """Stages and text as they come; closing the iterator cancels the request."""
        return Follow(self, lambda progress: progress)

    def __iter__(self) -> Follow[str]:
        return Follow(self, lambda progress: progress.text or None)

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Answer:
        try:
            async for _ in self._follow():
                pass
            return self.result()
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        try:
            async for progress in self._follow():
                if progress.text:
                    yield progress.text
            self.result()
        finally:
            self.cancel()

    async def _follow(self) -> AsyncIterator[Progress]:
        """What was heard, then what is heard, in this event loop."""
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[Progress | None] = asyncio.Queue()

        def listener(progress: Progress | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is gone and nobody listens
                loop.call_soon_threadsafe(arrived.put_nowait, progress)

        with self._news:
            for progress in self._heard:
                arrived.put_nowait(progress)
            self._listeners.append(listener)
        while (heard := await arrived.get()) is not None:
            yield heard


class Follow(Iterator[T]):
    """Follows a reply from its beginning. Closed or dropped before the end, it cancels the request."""

    def __init__(self, reply: Reply, pick: Callable[[Progress], T | None]):
        self._reply = reply
        self._pick = pick
        self._seen = 0
        self._over = False

    def __next__(self) -> T:
        while not self._over:
            with self._reply._news:
                while self._seen == len(self._reply._heard):
                    self._reply._news.wait()
                progress = self._reply._heard[self._seen]
            self._seen += 1
            if progress is None:
                self._over = True
                self._reply.result()  # raises what ended it
            elif (picked := self._pick(progress)) is not None:
                return picked
        raise StopIteration

    def close(self) -> None:
        """Stop following, and the request with it unless it has ended."""
        if not self._over:
            self._over = True
            self._reply.cancel()

    def __del__(self) -> None:
        if not self._over and self._reply._job is not None:
            self._reply._job.abandoned = True  # no locks: the collector may run in a thread that holds them


class Looseleaf:
    """A model, a store and an engine. Use as a context manager, or call `close`."""

    def __init__(self, adapter: Adapter, config: Config | None = None):
        self.config = config or Config()
        self.adapter = adapter
        self.store = open_store(
            self.config.store, memory_bytes=self.config.store_bytes, disk_bytes=self.config.disk_bytes,
            device=adapter.device,
        )  # fmt: skip
        self.builder = PromptBuilder(adapter, limits=self.config.media, canonical=self.config.canonical)
        self.linker = Linker(adapter, self.store, self.builder.canonical, max_rows=self.config.engine.max_rows)
        self.reference = Reference(self.builder, self.linker)
        """The model's own forward, to compare with."""
        audit = Audit(self.reference, self.config.audit) if self.config.audit else None
        self.engine = Engine(self.linker, self.config.engine, audit)
        self.calibration = find_calibration(
            Path(adapter.model.name_or_path), adapter.fingerprint, self.dtype, self.builder.canonical.identity,
            given=self.config.calibration,
        )  # fmt: skip
        """What was measured of this model; None: nothing yet."""
        self._warned = False
        if adapter.sees_images and not adapter.family.known:
            self.reference.check_images()
        if self.config.store != MEMORY:
            atexit.register(self.close)  # what waits to be written is
        self._driver: threading.Thread | None = None
        self._work = threading.Condition()
        self._closed = False

    @classmethod
    def open(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        device_map: Any = None,
        max_length: int | None = None,
        config: Config | None = None,
        tell: Callable[[str], None] = lambda stage: None,
    ) -> Looseleaf:
        """Open a model: a folder, a hub id, or nothing for the embedded one."""
        adapter = load_adapter(
            model,
            device=device,
            dtype=dtype,
            revision=revision,
            device_map=device_map,
            max_length=max_length,
            tell=tell,
        )
        return cls(adapter, config)

    @property
    def dtype(self) -> str:
        """Of the model's rows, as it is called everywhere."""
        return str(self.adapter.layout.dtype).removeprefix("torch.")

    def ask(self, prompt: PromptLike | Prompt, **options: Any) -> Answer:
        """Answer a prompt. Options: `policy`, `no_store`, `no_harvest`, `ttl_s` and everything in Sampling."""
        return self.submit(prompt, **options).result()

    def stream_ask(self, prompt: PromptLike, **options: Any) -> Follow[str]:
        """The answer's text in pieces, as it is made; closing the iterator cancels the request."""
        return iter(self.submit(prompt, **options))

    def submit(self, prompt: PromptLike | Prompt, **options: Any) -> Reply:
        """Put a prompt in line and go on: the Reply is awaitable and iterable."""
        reply = Reply(self)
        request = self.request(prompt, **options)
        reply._job = self.engine.submit(request, watcher=reply._hear)
        self._drive()
        return reply

    def step(self) -> bool:
        """Run one pass now, in this thread; False when there is nothing to do. Usually the driver thread does this."""
        return self.engine.step()

    def cancel(self, reply: Reply) -> bool:
        """Stop a request; False when it had ended already."""
        return reply.cancel()

    def plan(self, prompt: PromptLike | Prompt, **options: Any) -> Plan:
        """What would be read and computed for this prompt now, without doing it."""
        return self.engine.plan(self.request(prompt, **options))

    def warm(self, segments: Sequence[Segment], *, layers: Sequence[int] = (), ttl_s: float | None = None) -> int:
        """Compute chunks ahead and store them; how many were not stored yet. `layers`: keep states for DeepLayers."""
        prompt = self.builder.build([*segments, "."])
        chunks = [span.chunk for span in prompt.chunks if span.chunk is not None]
        with self.engine.lock:
            return self.linker.warm(chunks, layers=layers, keep=Keep(ttl_s=ttl_s))

    def settle(self) -> None:
        """Wait until nothing runs and what requests left behind is stored."""
        while True:
            while not self.engine.idle:
                self.engine.step()
            with self.engine.lock:  # another thread may be at work on the last of it
                if self.engine.idle:
                    break
        self.store.flush()

    def audited(self) -> AuditCounters:
        """What re-prefill would have said of the answers sampled so far; see `Config.audit`."""
        return self.engine.audit.counters if self.engine.audit is not None else AuditCounters()

    def stats(self) -> StoreStats:
        """What the store holds and how it did."""
        return self.store.stats()

    def request(
        self,
        prompt: PromptLike | Prompt,
        *,
        policy: Policy | str | None = None,
        no_store: bool = False,
        no_harvest: bool = False,
        ttl_s: float | None = None,
        start_pos: int = 0,
        held: Held | None = None,
        **sampling: Any,
    ) -> Request:
        """A prompt, built already or not, and options as the engine takes them; raises when any of them is wrong."""
        started = time.perf_counter()
        if isinstance(policy, str):
            policy = parse_policy(policy)
        if policy is not None and not isinstance(policy, Policy):
            raise PolicyError(f"policy must be a Policy or its name, got {policy!r}")
        if ttl_s is not None:
            check_number("ttl_s", ttl_s, low=0)
        check_truth("no_store", no_store)
        check_truth("no_harvest", no_harvest)
        known = set(Sampling.__dataclass_fields__)
        unknown = set(sampling) - known
        if unknown:
            raise ConfigError(
                f"unknown option {sorted(unknown)[0]!r}; there are policy, no_store, no_harvest, ttl_s, "
                f"{', '.join(sorted(known))}"
            )
        if isinstance(sampling.get("stop"), list):
            sampling["stop"] = tuple(sampling["stop"])
        chosen = Sampling(**sampling)
        if isinstance(prompt, Prompt):
            built = prompt
            self.builder.check_length(built, chosen.max_tokens)
        else:
            built = self.builder.build(prompt, start_pos=start_pos, max_tokens=chosen.max_tokens)
        tuned = self.tuned(policy or self.config.policy)
        return Request(
            prompt=built, policy=tuned, sampling=chosen,
            calibrated=self.calibration is not None and self.calibration.covers(tuned), held=held,
            keep=Keep(store=not no_store, harvest=not no_harvest, ttl_s=ttl_s), prepare_s=time.perf_counter() - started,
        )  # fmt: skip

    def tuned(self, policy: Policy) -> Policy:
        """A policy as the calibration sets it; without one, said aloud once."""
        if self.calibration is not None:
            return self.calibration.tune(policy)
        if policy.reuses_chunks and not self._warned:
            self._warned = True
            log.warning(
                "%s in %s is not calibrated: nobody has measured what reuse costs here, and answers say so; "
                "`looseleaf calibrate` measures it", self.adapter.name, self.dtype,
            )  # fmt: skip
        return policy

    def close(self) -> None:
        """End what runs, stop the driver, let go of the store."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        self.engine.close()
        atexit.unregister(self.close)
        if self._driver is not None and self._driver is not threading.current_thread():
            self._driver.join()
        self.store.close()

    def __enter__(self) -> Looseleaf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drive(self) -> None:
        """Make sure the driver thread runs and knows that there is work."""
        with self._work:
            if self._closed:
                raise ClosedError("this Looseleaf is closed; open it again")
            if self._driver is None:
                self._driver = threading.Thread(target=self._loop, name="looseleaf-engine", daemon=True)
                self._driver.start()
                atexit.register(self.close)  # a thread still computing while the interpreter ends would crash it
            self._work.notify_all()

    def _loop(self) -> None:
        while True:
            with self._work:
                while self.engine.idle and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
            self.engine.step()
