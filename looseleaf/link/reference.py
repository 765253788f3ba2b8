"""The model's own forward and `generate`, for comparing ours with.

Goes through the family's processor on the whole prompt and through transformers' own attention: none of our prompt
building, packing, caching or rotation. It also runs our machinery down to the logits of one prompt, which the engine
itself never shows. Benches and tests compare with it; `check_images` is what a model of an unlisted family must pass
before it is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image as PILImages
from torch import Tensor

from looseleaf.errors import ModelError, UnsupportedModelError
from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Patch
from looseleaf.link.held import Held
from looseleaf.link.linker import Keep, Linker
from looseleaf.link.policies import FullReuse, Policy, Reprefill
from looseleaf.link.sequence import Linked
from looseleaf.model.lane import Entry, Lane
from looseleaf.model.probe import TOLERANCE, stock_attention
from looseleaf.prompt.build import PromptBuilder
from looseleaf.prompt.chunks import Prompt
from looseleaf.prompt.media import read_picture
from looseleaf.prompt.segments import Document, Image, PromptLike, as_messages


@dataclass(frozen=True, kw_only=True)
class Stock:
    """A prompt as transformers takes it, and as we built it."""

    prompt: Prompt
    inputs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Way:
    """A prompt linked by a policy, and an answer put behind it whatever the logits say."""

    prompt: Prompt
    policy: Policy
    answer: tuple[int, ...] = (0,)
    patches: Mapping[int, Patch] = field(default_factory=dict)
    """By a chunk's first slot: put on beside what the policy brings."""
    max_rows: int | None = None
    """The prompt is computed in pieces of so many rows."""
    rows: KVRows | None = None
    """With room for the whole prompt: its rows are written here, keys un-rotated, when it is computed in one piece."""
    tamper: Callable[[Linked], None] | None = None
    """Plants a mistake."""
    keep: Keep = field(default_factory=Keep)
    held: Held | None = None
    """A window's rows."""


class Reference:
    """Both ways to the same logits: transformers' own, and ours."""

    def __init__(self, builder: PromptBuilder, linker: Linker):
        self.builder = builder
        self.linker = linker
        self.adapter = builder.adapter

    def stock(self, prompt: PromptLike, *, start_pos: int = 0) -> Stock:
        """Process a whole prompt with the family's own processor; raises when its tokens are not the ones we built."""
        built = self.builder.build(prompt, start_pos=start_pos)
        messages = as_messages(prompt)
        segments = [one for message in messages for one in message.content]
        if any(isinstance(one, Document) for one in segments) or not self.adapter.sees_images:
            return Stock(prompt=built, inputs={"input_ids": torch.tensor([built.ids], device=self.adapter.device)})
        rendered = self.builder.render(messages)
        images = [read_picture(one, self.builder.limits).pixels for one in segments if isinstance(one, Image)]
        grouped = [images] if self.adapter.family.fewer_among_others and images else images
        bos = self.adapter.tokenizer.bos_token
        out = self.adapter.processor(
            text=[rendered], images=(grouped or None), return_tensors="pt",
            add_special_tokens=not (bos and rendered.startswith(bos)),
        )  # fmt: skip
        if tuple(out["input_ids"][0].tolist()) != built.ids:
            raise ModelError(f"{self.adapter.name}: our prompt's tokens differ from its processor's")
        return Stock(prompt=built, inputs=self.adapter.moved(out))

    @torch.inference_mode()
    def logits(self, given: Stock, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Logits [token, vocabulary] of a plain forward, at given positions [axis, token] and with a mask if any."""
        inputs = {name: value for name, value in given.inputs.items() if name != "attention_mask"}
        if positions is not None:
            ids = positions[:, None] if self.adapter.axes > 1 else positions[:1]
            inputs["position_ids"] = ids.to(self.adapter.device)
        if mask is not None:
            inputs["attention_mask"] = mask
        with stock_attention(self.adapter.decoder):
            return self.adapter.model(**inputs).logits[0]

    @torch.inference_mode()
    def generate(self, given: Stock, tokens: int) -> tuple[int, ...]:
        """Greedy tokens of transformers' own `generate`."""
        with stock_attention(self.adapter.decoder):
            out = self.adapter.model.generate(
                **given.inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return tuple(out[0, len(given.prompt) :].tolist())

    def ours(self, prompt: Prompt, policy: Policy, *, tamper: Callable[[Linked], None] | None = None) -> Tensor:
        """Logits [vocabulary] of the first answered token, linked by a policy. `tamper` plants a mistake."""
        return self.along([Way(prompt=prompt, policy=policy, tamper=tamper)])[0][0]

    @torch.inference_mode()
    def along(self, ways: Sequence[Way]) -> list[Tensor]:
        """Logits [answered token, vocabulary] from which each token of each way's answer would be chosen.

        All ways share their passes. Since answers are given, ways are compared at the same places.
        """
        linked: list[Linked] = []
        try:
            linked += (self._link(way) for way in ways)
            return self._run(ways, linked)
        finally:
            for one in linked:
                one.release()

    def _run(self, ways: Sequence[Way], linked: Sequence[Linked]) -> list[Tensor]:
        decoder = self.adapter.decoder
        last: list[Tensor] = [torch.empty(0)] * len(ways)
        while waiting := [at for at, one in enumerate(linked) if not one.ready]:
            lanes = [self._take(ways[at], linked[at]) for at in waiting]
            for at, hidden in zip(waiting, decoder.run(lanes), strict=True):
                last[at] = hidden[-1:]
        longer = [at for at, way in enumerate(ways) if len(way.answer) > 1]
        lanes = [self._answer(ways[at], linked[at]) for at in longer]
        for at, hidden in zip(longer, decoder.run(lanes) if lanes else [], strict=True):
            last[at] = torch.cat((last[at], hidden))
        if not ways:
            return []
        return list(torch.split(decoder.logits(torch.cat(last)), [len(one) for one in last]))

    def _link(self, way: Way) -> Linked:
        capacity = len(way.prompt) + len(way.answer) - 1
        plan = self.linker.plan(way.prompt, way.policy, way.held)
        linked = self.linker.link(way.prompt, plan, capacity=capacity, keep=way.keep, held=way.held)
        linked.patches.update(way.patches)
        if way.tamper is not None:
            way.tamper(linked)
        return linked

    def _take(self, way: Way, linked: Linked) -> Lane:
        lane = linked.take(way.max_rows or self.linker.max_rows)
        if way.rows is not None:
            lane.capture = Capture(rows=way.rows)
        return lane

    def _answer(self, way: Way, linked: Linked) -> Lane:
        """A lane of the given answer's tokens behind the prompt."""
        told = torch.tensor(way.answer[:-1], device=self.adapter.device)
        slots = list(range(len(way.prompt), len(way.prompt) + len(told)))
        entry = Entry(slots=slots, hidden=self.adapter.decoder.embed(told))
        return Lane(table=linked.table, positions=linked.positions, entries={0: entry})

    def blind(self, given: Stock) -> Tensor:
        """Logits [vocabulary] of one stock forward that must equal blind reuse (Kamera §2, C.4).

        Chunks see themselves and the canonical context, nothing else. The canonical context stands right in front of
        every chunk, as it did when the chunk was computed: a copy of it is appended for each chunk at those positions,
        visible to that chunk alone.
        """
        prompt, canonical, axes = given.prompt, self.linker.canonical.ids, self.adapter.axes
        count, extra = len(prompt), len(canonical)
        total = count + extra * len(prompt.chunks)
        sees = torch.zeros(total, total, dtype=torch.bool)
        sees[:count, :count] = torch.ones(count, count, dtype=torch.bool).tril()
        positions = [prompt.positions]
        for number, span in enumerate(prompt.chunks):
            first = count + number * extra
            sees[span.start : span.stop, : span.start] = False
            sees[span.start : span.stop, first : first + extra] = True
            sees[first : first + extra, first : first + extra] = torch.ones(extra, extra, dtype=torch.bool).tril()
            positions.append((torch.arange(extra) + span.start_pos - extra).expand(axes, -1))
        ids = torch.tensor([prompt.ids + canonical * len(prompt.chunks)], device=self.adapter.device)
        inputs = {**given.inputs, "input_ids": ids}
        if "mm_token_type_ids" in inputs:
            kinds = inputs["mm_token_type_ids"]
            inputs["mm_token_type_ids"] = torch.cat((kinds, kinds.new_zeros(1, total - count)), dim=1)
        dtype = self.adapter.layout.dtype
        mask = torch.zeros(1, 1, total, total, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)
        longer = Stock(prompt=prompt, inputs=inputs)
        return self.logits(longer, positions=torch.cat(positions, dim=1), mask=mask.to(self.adapter.device))[count - 1]

    def check_images(self) -> None:
        """A plain forward and blind reuse of a small picture must come out as the model's own forward says."""
        picture = Image(PILImages.linear_gradient("L").resize((96, 64)))
        given = self.stock(["Look at", picture, "and say what it shows."])
        allowed = TOLERANCE.get(self.adapter.layout.dtype, 1e-4)
        for name, expected, policy in (
            ("a prompt with an image", self.logits(given)[-1], Reprefill()),
            ("a reused image", self.blind(given), FullReuse()),
        ):
            off = error(self.ours(given.prompt, policy), expected)
            if not off <= allowed:
                raise UnsupportedModelError(
                    f"{self.adapter.name}: {name} comes out {off:.1e} of the largest logit away from the model's own "
                    f"forward (allowed {allowed:.0e}); its family needs an entry: see docs/add-a-model.md"
                )


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value; infinite when anything is not a number."""
    off = float((got.float() - expected.float()).abs().max() / expected.float().abs().max())
    return off if math.isfinite(off) else math.inf


def divergence(reference: Tensor, arm: Tensor) -> float:
    """KL(reference ‖ arm) of next-token distributions, mean over places. Logits [place, vocabulary]."""
    expected, got = (torch.log_softmax(one.double(), dim=-1) for one in (reference, arm))
    nats = float((expected.exp() * (expected - got)).sum(-1).mean())
    if math.isnan(nats):
        raise ModelError("logits that are not numbers cannot be compared")
    return max(0.0, nats)
