"""Does reuse machinery change anything when it must not?

For every family, in fp32: recomputing everything under every policy against a plain forward; greedy answers against
`generate`; blind reuse against one stock forward with a 4-D mask; relocated keys against the model's own rotary;
prompts moved as a whole; requests packed together against the same alone. The same checks are then run on planted
mistakes and must catch them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image as PILImages
from torch import Tensor

from looseleaf.bench.report import BenchOptions, Report
from looseleaf.config import Config
from looseleaf.engine.request import Answer
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.link.policies import (
    Auto,
    DeepLayers,
    Deviation,
    FirstK,
    FullReuse,
    LayerAdaptive,
    LowRankKeys,
    Patched,
    Policy,
    PrefixCache,
    QueryAware,
    Reprefill,
)  # fmt: skip
from looseleaf.link.reference import error
from looseleaf.link.sequence import Linked
from looseleaf.model.loading import load_adapter
from looseleaf.model.rotary import PairOrder, Phase, RotaryForm, rotate
from looseleaf.model.tiny import FAMILIES, build_tiny
from looseleaf.prompt.segments import Document, Image, PromptLike, Segment
from looseleaf.system import Looseleaf

TOLERANCE = 1e-4
BLIND = FullReuse()
SHIFTS = (1, 7, 100, 1_000, 10_000, 100_000)

EVERYTHING: tuple[Policy, ...] = (
    Reprefill(), PrefixCache(), FirstK(k=10**6), Deviation(ratio=1.0), LayerAdaptive(ratio=1.0),
    QueryAware(ratio=1.0), LowRankKeys(rank=10**6), DeepLayers(from_layer=0), Patched(share=1.0),
    Auto(mode="exact"),
)  # fmt: skip
"""Every policy set so that nothing approximate is left: each must equal a plain forward."""

MIXED: tuple[Policy, ...] = (
    Reprefill(), PrefixCache(), FullReuse(), FirstK(k=8), Deviation(ratio=0.3), LayerAdaptive(ratio=0.3),
    DeepLayers(from_layer=2), FullReuse(two_step=True),
)  # fmt: skip
"""Eight requests for one batch."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """All families, all checks."""
    report = Report(bench="exact", options=options)
    families = options.models or FAMILIES
    controls: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, family in enumerate(families):
            tell(f"{family} ({number + 1} of {len(families)})")
            row, caught = check_family(family, Path(folder), options)
            report.rows.append(row)
            controls.update({f"{family}: {name}": one for name, one in caught.items()})
    rows = report.rows
    report.summary = {
        "models": len(rows),
        "logit_err_max": max(row["logit_err"] for row in rows),
        "greedy_equal": all(row["greedy_equal"] for row in rows),
        "mask_oracle_err_max": max(row["mask_oracle_err"] for row in rows),
        "relocate_pair_ulp_max": max(row["relocate_ulp"] for row in rows),
        "shift_noise_ratio": max(max(row["shift_fp32"], row["shift_bf16"]) for row in rows),
        "packed_err_max": max(row["packed_err"] for row in rows),
        "negative_controls_caught": f"{sum(controls.values())}/{len(controls)}",
    }
    missed = [name for name, one in controls.items() if not one]
    if missed:
        report.summary["negative_controls_missed"] = missed
    return report


def check_family(family: str, folder: Path, options: BenchOptions) -> tuple[dict[str, Any], dict[str, bool]]:
    """One family: its row of the table, and which planted mistakes were caught."""
    path = build_tiny(family, folder / family, seed=options.seed)
    ll = Looseleaf(load_adapter(path, device=options.device, dtype="float32"))
    prompts = make_prompts(ll, options.seed, 1 if options.quick else 3)
    row: dict[str, Any] = {"family": family}
    row["logit_err"] = max(full_recompute_error(ll, prompt, policy) for prompt in prompts for policy in EVERYTHING)
    row["greedy_equal"] = all(greedy_equal(ll, prompt) for prompt in prompts)
    row["mask_oracle_err"] = max(
        mask_oracle_error(one, prompt) for one in (ll, _without_preamble(ll)) for prompt in prompts
    )
    shifts = SHIFTS[::5] if options.quick else SHIFTS
    row["relocate_ulp"] = max(relocate_ulp(ll, prompts[0], shift) for shift in shifts)
    moved = make_prompts(ll, options.seed + 1, 5 if options.quick else 9)
    row["shift_fp32"] = shift_noise_ratio(ll, moved, shifts)
    row["packed_err"] = packed_error(ll, prompts)
    caught = negative_controls(ll, prompts[0])
    half = Looseleaf(load_adapter(path, device=options.device, dtype="bfloat16"))
    row["relocate_ulp"] = max(row["relocate_ulp"], *(relocate_ulp(half, prompts[0], shift) for shift in shifts))
    row["shift_bf16"] = shift_noise_ratio(half, moved, shifts)
    yarn = build_tiny(family, folder / f"{family}-yarn", seed=options.seed, overrides=_YARN)
    caught["doubled YaRN factor"] = yarn_control(Looseleaf(load_adapter(yarn, device=options.device)), options.seed)
    return row, caught


_YARN = {
    "text_config.rope_parameters": {
        "rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "attention_factor": 1.2,
    }
}  # fmt: skip


def make_prompts(ll: Looseleaf, seed: int, count: int) -> list[list[Segment]]:
    """Prompts with two or three chunks of different sizes between words, drawn from a seed."""
    chance = np.random.default_rng(seed)
    prompts: list[list[Segment]] = []
    for number in range(count):
        chunks = [_chunk(ll, chance) for _ in range(2 + number % 2)]
        words = ["Please look at", "and then at", "or also", "and say what differs."]
        prompt: list[Segment] = [words[0]] if number != 1 else []
        for at, chunk in enumerate(chunks):
            prompt += [chunk, words[min(at + 1, 2)] if at + 1 < len(chunks) else words[3]]
        prompts.append(prompt)
    return prompts


def _chunk(ll: Looseleaf, chance: np.random.Generator) -> Segment:
    if ll.adapter.sees_images:
        width, height = chance.choice([84, 112, 140, 168], 2)
        return Image(PILImages.fromarray(chance.integers(0, 255, (height, width, 3), dtype=np.uint8)))
    names = ("square", "circle", "star", "ring")
    return Document(" ".join(f"The {names[one]} number {one} is red." for one in chance.integers(0, 4, 6)))


def full_recompute_error(ll: Looseleaf, prompt: PromptLike, policy: Policy) -> float:
    """A policy that leaves nothing approximate, against a plain forward."""
    given = ll.reference.stock(prompt)
    expected = ll.reference.logits(given)[-1]
    got = ll.reference.ours(given.prompt, policy)
    if policy.uses_prefix:  # once more, from stored rows
        ll.ask(prompt, policy=policy, max_tokens=1)
        ll.step()  # an answer is out before its rows are stored; wait until they are
        assert ll.plan(prompt, policy=policy).prefix_tokens > 0, "nothing was reused: the check would be empty"
        return max(error(got, expected), error(ll.reference.ours(given.prompt, policy), expected))
    if policy.patch is not None:  # once more, patched in full
        ll.ask(prompt, policy=policy, max_tokens=1)
        ll.settle()
        assert ll.plan(prompt, policy=policy).count().patched, "nothing was patched: the check would be empty"
        return max(error(got, expected), error(ll.reference.ours(given.prompt, policy), expected))
    return error(got, expected)


def greedy_equal(ll: Looseleaf, prompt: PromptLike, tokens: int = 32) -> bool:
    """Greedy answers of the engine against `generate`."""
    answer = ll.ask(prompt, policy=Reprefill(), max_tokens=tokens, ignore_eos=True)
    return answer.token_ids == ll.reference.generate(ll.reference.stock(prompt), tokens)


def mask_oracle_error(
    ll: Looseleaf, prompt: PromptLike, *, instead: PromptLike | None = None, policy: Policy = BLIND,
    tamper: Callable[[Linked], None] | None = None,
) -> float:  # fmt: skip
    """Blind reuse against one stock forward that blocks attention between chunks; the options plant mistakes."""
    expected = ll.reference.blind(ll.reference.stock(prompt))
    asked = instead if instead is not None else prompt
    assert any(piece.use == "reuse" for piece in ll.plan(asked, policy=policy).pieces), "nothing reused: an empty check"
    return error(ll.reference.ours(ll.builder.build(asked), policy, tamper=tamper), expected)


@torch.inference_mode()
def relocate_ulp(ll: Looseleaf, prompt: PromptLike, shift: int) -> float:
    """Stored keys turned by us against keys the model itself turned at the same positions, in ulps of a pair's norm."""
    request = ll.request(prompt, policy=Reprefill(), start_pos=shift)
    linked = ll.linker.link(request.prompt, ll.engine.plan(request), capacity=len(request.prompt), keep=request.keep)
    lane = linked.take(10**9)
    lane.capture = Capture(rows=KVRows(ll.adapter.layout, len(request.prompt), ll.adapter.device))
    ll.adapter.decoder.run([lane])
    assert lane.capture.rows is not None
    phase = ll.adapter.decoder.phase(linked.positions[:, : len(request.prompt)])
    worst = 0.0
    turned = linked.table.rows.part(0, len(request.prompt))
    for raw, own in zip(lane.capture.rows.keys, turned.keys, strict=True):
        ours = rotate(raw, phase, ll.adapter.decoder.form)
        worst = max(worst, float(((ours - own).abs().float() / pair_ulp(own, ll.adapter.decoder.form)).max()))
    return worst


def pair_ulp(keys: Tensor, form: RotaryForm) -> Tensor:
    """One unit in the last place of each pair's norm, for every number of a key. keys [..., dim]."""
    turned = keys[..., : form.dim].float()
    if form.order is PairOrder.PAIRS:
        norm = turned.view(*turned.shape[:-1], -1, 2).norm(dim=-1).repeat_interleave(2, dim=-1)
    else:
        halves = turned.reshape(*turned.shape[:-1], 2, -1).norm(dim=-2)
        norm = torch.cat((halves, halves), dim=-1)
    rest = keys[..., form.dim :].float().abs()
    scale = torch.cat((norm, rest), dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.finfo(keys.dtype).eps * torch.exp2(torch.floor(torch.log2(scale)))


def shift_noise_ratio(ll: Looseleaf, prompts: Sequence[PromptLike], shifts: Sequence[int] = SHIFTS) -> float:
    """How much moving a prompt changes a reused answer, over how much it changes a plain forward; the worst shift.

    Medians over prompts: where two experts of an MoE tie, rounding alone flips the router and one prompt jumps, in
    either arm.
    """
    worst = 0.0
    plain = [ll.reference.logits(ll.reference.stock(one))[-1] for one in prompts]
    ours = [ll.reference.ours(ll.builder.build(one), BLIND) for one in prompts]
    for shift in shifts:
        noise, moved = [], []
        for number, prompt in enumerate(prompts):
            given = ll.reference.stock(prompt, start_pos=shift)
            there = ll.reference.logits(given, positions=given.prompt.positions)[-1]
            noise.append(float((there - plain[number]).float().norm()))
            reused = ll.reference.ours(given.prompt, BLIND)
            moved.append(float((reused - ours[number]).float().norm()))
        worst = max(worst, statistics.median(moved) / statistics.median(noise))
    return worst


def packed_error(ll: Looseleaf, prompts: Sequence[PromptLike]) -> float:
    """Eight mixed requests in one batch, prompts in pieces, against each alone: log-probabilities of every token."""
    asked = [(prompts[at % len(prompts)], policy) for at, policy in enumerate(MIXED)]
    alone = [_answers(ll, [one])[0] for one in asked]
    small = Looseleaf(ll.adapter, Config(engine=EngineConfig(max_rows=48)))
    together = _answers(small, asked)
    return max(_logprob_error(one, other) for one, other in zip(alone, together, strict=True))


def _logprob_error(one: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities, up to the first token two answers tie on and choose differently."""
    assert one.logprobs is not None
    assert other.logprobs is not None
    worst = 0.0
    for left, right in zip(one.logprobs, other.logprobs, strict=True):
        for (_, a), (_, b) in zip(left.top, right.top, strict=True):
            worst = max(worst, abs(a - b) if math.isfinite(a) and math.isfinite(b) else math.inf)
        if left.token_id != right.token_id:
            break
    return worst


def _answers(ll: Looseleaf, asked: Sequence[tuple[PromptLike, Policy]]) -> list[Answer]:
    jobs = [
        ll.engine.submit(ll.request(prompt, policy=policy, max_tokens=8, ignore_eos=True, logprobs=10))
        for prompt, policy in asked
    ]
    while ll.engine.step():
        pass
    for job in jobs:
        if job.error is not None:
            raise job.error
    return [job.answer for job in jobs if job.answer is not None]


def negative_controls(ll: Looseleaf, prompt: Sequence[Segment]) -> dict[str, bool]:
    """Planted mistakes: whether the mask-oracle check fails on each."""
    chunks = [at for at, one in enumerate(prompt) if not isinstance(one, str)]
    swapped = list(prompt)
    swapped[chunks[0]], swapped[chunks[1]] = prompt[chunks[1]], prompt[chunks[0]]
    return {
        "chunk left at its old position": mask_oracle_error(ll, prompt, policy=FullReuse(relocate=False)) > TOLERANCE,
        "swapped image": mask_oracle_error(ll, prompt, instead=swapped) > TOLERANCE,
        "off-by-one position": mask_oracle_error(ll, prompt, tamper=_off_by_one) > TOLERANCE,
    }


def _off_by_one(linked: Linked) -> None:
    span = linked.prompt.chunks[-1]
    linked.positions[:, span.start : span.stop] += 1


def yarn_control(ll: Looseleaf, seed: int) -> bool:
    """With YaRN the check holds as it is, and fails when the attention factor is applied twice."""
    prompt = make_prompts(ll, seed, 1)[0]
    if not mask_oracle_error(ll, prompt) <= TOLERANCE:
        return False
    factor = float(ll.adapter.decoder.parts.rotary.attention_scaling)
    with _doubled(ll, factor):
        return mask_oracle_error(ll, prompt) > TOLERANCE


@contextmanager
def _doubled(ll: Looseleaf, factor: float) -> Iterator[None]:
    decoder: Any = ll.adapter.decoder
    plain: Callable[[Tensor], Phase] = decoder.phase

    def twice(positions: Tensor) -> Phase:
        phase = plain(positions)
        return Phase(cos=phase.cos * factor, sin=phase.sin * factor)

    decoder.phase = twice
    try:
        yield
    finally:
        del decoder.phase


def _without_preamble(ll: Looseleaf) -> Looseleaf:
    return Looseleaf(ll.adapter, Config(canonical="none"))


def plot(report: Report, path: Path) -> None:
    """Errors by family on a log scale, with the bar they must stay under."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots()
    names = [row["family"] for row in report.rows]
    for shift, key in enumerate(("logit_err", "mask_oracle_err", "packed_err")):
        axes.bar([at + 0.25 * shift for at in range(len(names))], [row[key] for row in report.rows], 0.25, label=key)
    axes.axhline(TOLERANCE, color="black", linewidth=1, linestyle=":", label="allowed")
    axes.set_yscale("log")
    axes.set_xticks([at + 0.25 for at in range(len(names))], names, rotation=30, ha="right")
    axes.set_ylim(top=10 * TOLERANCE)
    axes.legend(ncols=4, frameon=False, loc="upper center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
