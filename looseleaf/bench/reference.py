"""The model's own forward and `generate`, for comparing ours with.

Goes through the family's processor on the whole prompt and through transformers' own attention: none of our prompt
building, packing, caching or rotation. It also runs our machinery down to the logits of one prompt, which the engine
itself never shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from looseleaf.engine.request import Request
from looseleaf.errors import ModelError
from looseleaf.kv.attention import NAME
from looseleaf.link.linker import Linked
from looseleaf.model.probe import stock_attention
from looseleaf.prompt.chunks import Prompt
from looseleaf.prompt.media import read_picture
from looseleaf.prompt.segments import Document, Image, PromptLike, as_messages
from looseleaf.system import Looseleaf


@dataclass(frozen=True, kw_only=True)
class Stock:
    """A prompt as transformers takes it, and as we built it."""

    prompt: Prompt
    inputs: dict[str, Any]


def stock(ll: Looseleaf, prompt: PromptLike, *, start_pos: int = 0) -> Stock:
    """Process a whole prompt with the family's own processor; raises when its tokens are not the ones we built."""
    built = ll.builder.build(prompt, start_pos=start_pos)
    messages = as_messages(prompt)
    segments = [one for message in messages for one in message.content]
    if any(isinstance(one, Document) for one in segments) or not ll.adapter.sees_images:
        return Stock(prompt=built, inputs={"input_ids": torch.tensor([built.ids], device=ll.adapter.device)})
    rendered = ll.builder.render(messages)
    images = [read_picture(one, ll.config.media).pixels for one in segments if isinstance(one, Image)]
    bos = ll.adapter.tokenizer.bos_token
    out = ll.adapter.processor(
        text=[rendered], images=images or None, return_tensors="pt",
        add_special_tokens=not (bos and rendered.startswith(bos)),
    )  # fmt: skip
    if tuple(out["input_ids"][0].tolist()) != built.ids:
        raise ModelError(f"{ll.adapter.name}: our prompt's tokens differ from its processor's")
    return Stock(prompt=built, inputs=ll.adapter.moved(out))


@torch.inference_mode()
def stock_logits(ll: Looseleaf, given: Stock, *, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
    """Logits [token, vocabulary] of a plain forward, at given positions [axis, token] and with a mask if any."""
    inputs = {name: value for name, value in given.inputs.items() if name != "attention_mask"}
    if positions is not None:
        inputs["position_ids"] = positions[:, None] if ll.adapter.axes > 1 else positions[:1]
        inputs["position_ids"] = inputs["position_ids"].to(ll.adapter.device)
    if mask is not None:
        inputs["attention_mask"] = mask
    with stock_attention(ll.adapter.decoder):
        return ll.adapter.model(**inputs).logits[0]  # type: ignore[no-any-return]


@torch.inference_mode()
def stock_generate(ll: Looseleaf, given: Stock, tokens: int) -> tuple[int, ...]:
    """Greedy tokens of transformers' own `generate`."""
    with stock_attention(ll.adapter.decoder):
        out = ll.adapter.model.generate(
            **given.inputs, max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return tuple(out[0, len(given.prompt) :].tolist())


@torch.inference_mode()
def our_logits(ll: Looseleaf, request: Request, *, tamper: Callable[[Linked], None] | None = None) -> Tensor:
    """Logits [vocabulary] of the first answered token, linked as the request says. `tamper` plants a mistake."""
    plan = ll.engine.plan(request)
    linked = ll.linker.link(request.prompt, plan, capacity=len(request.prompt), keep=request.keep)
    if tamper is not None:
        tamper(linked)
    while not linked.ready:
        (hidden,) = ll.adapter.decoder.run([linked.take(ll.config.engine.max_rows)])
    return ll.adapter.decoder.logits(hidden[-1:])[0]


def error(got: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


@torch.inference_mode()
def blind_mask(ll: Looseleaf, given: Stock) -> tuple[Stock, Tensor, Tensor]:
    """One stock forward that must equal blind reuse: chunks see themselves and the canonical context, nothing else.

    The canonical context stands right in front of every chunk, as it did when the chunk was computed: a copy of it is
    appended for each chunk at those positions, visible to that chunk alone. Returns the prompt with the copies, its
    positions [axis, token] and the 4-D mask.
    """
    prompt, canonical = given.prompt, ll.linker.canonical.ids
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
        positions.append((torch.arange(extra) + span.start_pos - extra).expand(ll.adapter.axes, -1))
    ids = torch.tensor([prompt.ids + canonical * len(prompt.chunks)], device=ll.adapter.device)
    inputs = {**given.inputs, "input_ids": ids}
    if "mm_token_type_ids" in inputs:
        kinds = inputs["mm_token_type_ids"]
        inputs["mm_token_type_ids"] = torch.cat((kinds, kinds.new_zeros(1, total - count)), dim=1)
    dtype = ll.adapter.layout.dtype
    mask = torch.zeros(1, 1, total, total, dtype=dtype).masked_fill_(~sees, torch.finfo(dtype).min)
    return Stock(prompt=prompt, inputs=inputs), torch.cat(positions, dim=1), mask.to(ll.adapter.device)


def uses_our_attention(ll: Looseleaf) -> bool:
    """Whether the decoder is switched to our attention (a check that comparisons compare two things)."""
    return bool(ll.adapter.decoder.parts.text.config._attn_implementation == NAME)
