"""The engine: requests in, answers out; each `step` is schedule → run → postprocess.

Rows of all running requests are packed into one pass (continuous batching). `submit`, `step` and `cancel` may be called
from any thread; only `step` takes as long as a pass, and nothing here starts a thread. A request that fails ends alone:
others go on.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from looseleaf.engine.request import Answer, Progress, Request, Timing, TokenLogprob, Usage
from looseleaf.engine.sampling import choose, make_generator
from looseleaf.engine.scheduler import EngineConfig, Running, admit, schedule
from looseleaf.engine.words import Words
from looseleaf.errors import CancelledError, ClosedError, LimitError, QueueFullError
from looseleaf.link.audit import TOKENS, Audit
from looseleaf.link.harvest import Harvest
from looseleaf.link.linker import Linker
from looseleaf.link.plan import Plan
from looseleaf.link.sequence import Linked
from looseleaf.model.lane import Entry, Lane

log = logging.getLogger(__name__)

T = TypeVar("T")


class Job:
    """A request in the engine. Watchers hear of progress and of its end; `answer` or `error` is set at the end."""

    def __init__(self, number: int, request: Request, capacity: int, size_bytes: int):
        self.id = number
        self.request = request
        self.capacity = capacity
        self.size_bytes = size_bytes
        self.submitted_at = time.perf_counter()
        self.answer: Answer | None = None
        self.error: BaseException | None = None
        self.abandoned = False
        """Set when nobody can ask for the answer any more; the next step cancels it."""
        self.done = threading.Event()
        self.watchers: list[Callable[[Job, Progress | None], None]] = []

    def tell(self, progress: Progress | None) -> None:
        """Inform whoever watches; None says that it is over."""
        for watcher in self.watchers:
            watcher(self, progress)


@dataclass
class _Sequence:
    """A running job: its linked rows and what it has answered so far."""

    job: Job
    linked: Linked
    words: Words
    generator: torch.Generator | None
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    first_token_at: float = 0.0
    finish_reason: str = ""
    heard: list[torch.Tensor] | None = None
    """When it is audited: the logits [vocabulary] its first tokens were chosen from."""


class Engine:
    """Continuous batching over packed passes of one model."""

    def __init__(self, linker: Linker, config: EngineConfig | None = None, audit: Audit | None = None):
        self.linker = linker
        self.audit = audit
        self.harvest = Harvest(linker)
        self.config = config or EngineConfig()
        self._numbers = itertools.count(1)
        self._waiting: deque[Job] = deque()
        self._running: dict[int, _Sequence] = {}
        self.lock = threading.RLock()
        """Held while a pass runs, by whoever computes with the model."""
        self._door = threading.Lock()
        """Held for moments: the waiting line, and who ends a job."""
        self._closed = False

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs, holds memory a step would free, or is left to be harvested or audited."""
        left = self.harvest.waiting or (self.audit is not None and self.audit.waiting)
        return not self._waiting and not self._running and not left

    def plan(self, request: Request) -> Plan:
        """What would be read and computed for a request now, without doing it."""
        return self.linker.plan(request.prompt, request.policy, request.held)

    def submit(self, request: Request, *, watcher: Callable[[Job, Progress | None], None] | None = None) -> Job:
        """Put a request in line. Raises QueueFullError or LimitError, never drops one silently."""
        capacity = len(request.prompt) + request.sampling.max_tokens
        size_bytes = capacity * self.linker.adapter.layout.row_bytes
        if size_bytes > self.config.kv_budget_bytes:
            raise LimitError(
                f"{capacity:,} tokens need {size_bytes / 2**20:,.0f} MiB of KV; the engine has "
                f"{self.config.kv_budget_bytes / 2**20:,.0f} MiB. Shorten the prompt or raise engine.kv_budget_bytes"
            )
        with self._door:
            if self._closed:
                raise ClosedError("the engine is closed; open looseleaf again")
            if len(self._waiting) >= self.config.max_waiting:
                raise QueueFullError(f"{len(self._waiting)} requests are waiting already; try again later")
            job = Job(next(self._numbers), request, capacity, size_bytes)
            if watcher is not None:
                job.watchers.append(watcher)
            self._waiting.append(job)
        self.linker.expect(request.prompt, request.policy)
        return job

    def cancel(self, job: Job) -> bool:
        """Stop a request; False when it had ended already. What it holds is freed by the next step."""
        with self._door:
            if job in self._waiting:
                self._waiting.remove(job)
        return self._end(job, error=CancelledError(f"request {job.id} was cancelled"))

    @torch.inference_mode()
    def step(self) -> bool:
        """Admit, run one pass, hand out tokens. False when there was nothing to do."""
        with self.lock:
            self._reap()
            self._admit()
            if not self._running or self.harvest.pressing:
                worked = self.harvest.work(hurry=bool(self._running)) or (
                    self.audit is not None and not self._running and self.audit.work()
                )
                if not self._running:
                    return worked
            plan = schedule(
                [
                    Running(id=one.job.id, rows_left=_rows_left(one.linked), splittable=one.linked.plan.splittable)
                    for one in self._running.values()
                ],
                self.config,
            )
            decoding = [self._running[number] for number in plan.decode]
            prefilling = [(self._running[number], rows) for number, rows in plan.prefill]
            lanes = self._decode_lanes(decoding)
            sequences = list(decoding)
            for one, rows in prefilling:
                lane = self._guard(one, lambda one=one, rows=rows: one.linked.take(rows))  # type: ignore[misc]
                if lane is not None:
                    lanes.append(lane)
                    sequences.append(one)
            self._run(sequences, lanes)
            self._reap()
            return True

    def close(self) -> None:
        """End every request and take no more."""
        with self._door:
            self._closed = True
            left = [*self._waiting]
            self._waiting.clear()
        with self.lock:
            for job in [*left, *(one.job for one in self._running.values())]:
                self._end(job, error=ClosedError("the engine was closed while the request ran"))
            self._reap()
            self.harvest.clear()
            if self.audit is not None:
                self.audit.clear()

    def _reap(self) -> None:
        """Cancel what was abandoned, and free what ended requests hold."""
        with self._door:
            left = [job for job in self._waiting if job.abandoned]
        for job in [*left, *(one.job for one in self._running.values() if one.job.abandoned)]:
            self.cancel(job)
        for one in [one for one in self._running.values() if one.job.done.is_set()]:
            del self._running[one.job.id]
            one.linked.release()

    def _admit(self) -> None:
        used = sum(one.job.size_bytes for one in self._running.values())
        with self._door:
            count = admit([job.size_bytes for job in self._waiting], len(self._running), used, self.config)
            joining = [self._waiting.popleft() for _ in range(count)]
        for job in joining:
            waited = time.perf_counter() - job.submitted_at
            try:
                job.tell(Progress(stage="link"))
                generator = make_generator(job.request.sampling, self.linker.adapter.device)
                plan = self.plan(job.request)
                linked = self.linker.link(
                    job.request.prompt, plan, capacity=job.capacity, keep=job.request.keep, held=job.request.held
                )
            except Exception as error:
                self._end(job, error=error)
                continue
            linked.stages.prepare_s, linked.stages.queue_s = job.request.prepare_s, waited
            job.tell(Progress(stage="prefill"))
            self._running[job.id] = _Sequence(
                job=job, linked=linked,
                words=Words(self.linker.adapter.tokenizer, job.request.sampling.stop),
                generator=generator, heard=[] if self._audits(job, linked.plan) else None,
            )  # fmt: skip

    def _audits(self, job: Job, plan: Plan) -> bool:
        """Whether an answer is compared later; a window's is not, since it may remember what its prompt lacks."""
        return self.audit is not None and job.request.held is None and self.audit.picks(plan)

    def _decode_lanes(self, decoding: Sequence[_Sequence]) -> list[Lane]:
        """One row for each decoding sequence: its last token."""
        if not decoding:
            return []
        adapter = self.linker.adapter
        hidden = adapter.decoder.embed(torch.tensor([one.answer[-1] for one in decoding], device=adapter.device))
        lanes = []
        for row, one in enumerate(decoding):
            slot = len(one.linked.prompt) + len(one.answer) - 1
            entry = Entry(slots=[slot], hidden=hidden[row : row + 1])
            lanes.append(Lane(table=one.linked.table, positions=one.linked.positions, entries={0: entry}, decodes=True))
        return lanes

    def _run(self, sequences: Sequence[_Sequence], lanes: list[Lane]) -> None:
        """One packed pass; should it fail, each lane alone, so that only the one at fault ends."""
        if not lanes:
            return
        decoder = self.linker.adapter.decoder
        started = time.perf_counter()
        try:
            hidden = decoder.run(lanes)
        except Exception as error:
            if len(lanes) == 1:
                self._end(sequences[0].job, error=error)
                return
            for one, lane in zip(sequences, lanes, strict=True):
                self._run([one], [lane])
            return
        spent = time.perf_counter() - started
        ready = []
        for at, one in enumerate(sequences):
            if not one.answer:
                one.linked.stages.prefill_s += spent
            if one.linked.ready:
                ready.append(at)
        if ready:
            logits = decoder.logits(torch.cat([hidden[at][-1:] for at in ready]))
            self._advance([sequences[at] for at in ready], logits)

    def _advance(self, sequences: Sequence[_Sequence], logits: torch.Tensor) -> None:
        """Choose a token for each sequence, tell its watchers, end what is finished."""
        samplings = [one.job.request.sampling for one in sequences]
        chosen = choose(logits, samplings, [one.generator for one in sequences])
        now = time.perf_counter()
        for row, (one, choice) in enumerate(zip(sequences, chosen, strict=True)):
            if one.heard is not None and len(one.heard) < TOKENS:
                one.heard.append(logits[row].clone())
            if choice.error is not None:
                self._end(one.job, error=choice.error)
                continue
            if not one.answer:
                one.first_token_at = now
                one.linked.stages.ttft_s = now - one.job.submitted_at + one.job.request.prepare_s
            self._guard(one, lambda one=one, choice=choice: self._take(one, choice.token, choice.note))  # type: ignore[misc]

    def _take(self, one: _Sequence, token: int, note: TokenLogprob | None) -> None:
        if one.job.done.is_set():  # cancelled meanwhile
            return
        sampling = one.job.request.sampling
        one.answer.append(token)
        if note is not None:
            one.logprobs.append(note)
        if token in self.linker.adapter.eos_ids and not sampling.ignore_eos:
            one.finish_reason = "stop"
        else:
            piece = one.words.add(token)
            one.job.tell(Progress(stage="decode", text=piece, token_id=token))
            if one.words.stopped:
                one.finish_reason = "stop"
        if not one.finish_reason and len(one.answer) >= sampling.max_tokens:
            one.finish_reason = "length"
        if one.finish_reason:
            self._finish(one)

    def _finish(self, one: _Sequence) -> None:
        rest = one.words.finish()
        if rest:
            one.job.tell(Progress(stage="decode", text=rest))
        told = one.job.request.sampling.logprobs is not None
        answer = Answer(
            text=one.words.text, token_ids=tuple(one.answer), finish_reason=one.finish_reason, usage=_usage(one),
            plan=one.linked.plan, logprobs=tuple(one.logprobs) if told else None,
        )  # fmt: skip
        self._hold(one)
        self._end(one.job, answer=answer)
        # off the request's path: its answer is out
        if one.job.request.policy.uses_prefix:
            self.linker.harvest(one.linked, tuple(one.answer[:-1]), one.job.request.keep)
        self.harvest.note(one.linked, one.job.request.keep)
        if self.audit is not None and one.heard:
            self.audit.note(one.linked.prompt, tuple(one.answer), one.heard, one.job.request.keep)

    def _hold(self, one: _Sequence) -> None:
        """Give a window its rows, before the answer is out: whoever asks next counts on them."""
        if one.job.request.held is None:
            return
        try:
            one.job.request.held.take(one.linked)
        except Exception:
            log.exception("a window's rows could not be kept; its next question computes them again")

    def _guard(self, one: _Sequence, act: Callable[[], T]) -> T | None:
        """Do something for one sequence; if it fails, that sequence ends with the error and others go on."""
        try:
            return act()
        except Exception as error:
            self._end(one.job, error=error)
            return None

    def _end(self, job: Job, *, answer: Answer | None = None, error: BaseException | None = None) -> bool:
        """End a job, unless it has ended already."""
        with self._door:
            if job.done.is_set():
                return False
            job.answer, job.error = answer, error
            job.done.set()
        job.tell(None)
        return True


def _rows_left(linked: Linked) -> int:
    return 0 if linked.ready else linked.rows_left()


def _usage(one: _Sequence) -> Usage:
    count, stages, plan = one.linked.plan.count(), one.linked.stages, one.linked.plan
    timing = Timing(
        prepare_s=stages.prepare_s, queue_s=stages.queue_s, vision_s=stages.vision_s, chunks_s=stages.chunks_s,
        link_s=stages.link_s, prefill_s=max(0.0, stages.prefill_s - stages.link_s), ttft_s=stages.ttft_s,
        decode_s=time.perf_counter() - one.first_token_at,
    )  # fmt: skip
    return Usage(
        prompt_tokens=plan.tokens, exact_tokens=count.exact, relocated_tokens=count.relocated,
        kept_tokens=count.kept, patched_tokens=count.patched,
        recomputed_tokens=count.recomputed, fresh_tokens=count.fresh, completion_tokens=len(one.answer),
        approximate=plan.approximate, calibrated=one.job.request.calibrated or not plan.approximate, timing=timing,
    )  # fmt: skip
