"""What does each policy save, and how far is it from the floor?

A random-weight Qwen2.5-VL-class model of SmolLM size (30 layers, width 576, 9 query and 3 KV heads), four images of 256
tokens in new places between 64 rows of text. Seconds to the first token from the moment the engine gets the request;
the vision tower and the preparation of the prompt are apart (features are stored). All arms alternate in one process;
medians. The floor is a stock forward of the same rows over the same context, plus one copy of the reused KV.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image as PILImages
from transformers.cache_utils import DynamicCache

from looseleaf.bench.report import BenchOptions, Report
from looseleaf.config import Config
from looseleaf.engine.engine import Job
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.link.policies import FirstK, FullReuse, Patched, Policy, Reprefill
from looseleaf.model.loading import load_adapter
from looseleaf.model.probe import stock_attention
from looseleaf.model.tiny import build_tiny
from looseleaf.prompt.segments import Image, Segment
from looseleaf.system import Looseleaf

SMOL = {
    "text_config.num_hidden_layers": 30, "text_config.hidden_size": 576, "text_config.num_attention_heads": 9,
    "text_config.num_key_value_heads": 3, "text_config.intermediate_size": 1536, "text_config.vocab_size": 49152,
    "text_config.rope_parameters": {"mrope_section": [8, 12, 12]}, "vision_config.out_hidden_size": 576,
}  # fmt: skip
IMAGES = 4
SIDE = 448
"""Pixels of an image's side: 16 x 16 merged patches, 256 tokens."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Both dtypes; a summary key per dtype."""
    report = Report(bench="ttft", options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.model) if options.model else build_tiny("qwen2_5_vl", Path(folder) / "smol", overrides=SMOL)
        for dtype in ("float32", "bfloat16"):
            rows, summary = time_model(path, dtype, options, tell)
            report.rows += rows
            for key, value in summary.items():
                report.summary.setdefault(key, {})[dtype] = value
    return report


def time_model(
    path: Path, dtype: str, options: BenchOptions, tell: Callable[[str], None]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """One dtype: a row per arm, and the summary's figures."""
    adapter = load_adapter(path, dtype=dtype, device=options.device)
    adapter.processor.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    # one pass for a whole prompt: a chunked prefill would be compared with an unchunked one
    ll = Looseleaf(adapter, Config(engine=EngineConfig(max_rows=8192)))
    prompt = make_prompt(options.seed)
    images = [one for one in prompt if isinstance(one, Image)]
    ll.warm(images)
    built = ll.builder.build(prompt)
    reused = sum(len(span) for span in built.chunks)
    text = len(built) - reused
    arms: dict[str, Callable[[], float]] = {
        "copy of the reused KV": copy_rows(ll, reused),
        "transformers, all rows": stock_rows(ll, len(built), 0),
        "transformers, text rows": stock_rows(ll, text, reused),
        "transformers, text + 32 an image": stock_rows(ll, text + 32 * IMAGES, reused - 32 * IMAGES),
    }
    policies = {"reprefill": Reprefill(), "full-reuse": FullReuse(), "full-reuse two-step": FullReuse(two_step=True),
                "first-k:32": FirstK(k=32), "patched 6%": Patched(share=0.06), "patched 25%": Patched()}  # fmt: skip
    arms |= {name: first_token(ll, prompt, policy) for name, policy in policies.items()}
    for arm in arms.values():
        arm()
    taken: dict[str, list[float]] = {name: [] for name in arms}
    rounds = 2 if options.quick else 21
    for number in range(rounds):
        tell(f"{dtype}: first tokens, round {number + 1} of {rounds}")
        for name, arm in arms.items():
            taken[name].append(arm())
    median = {name: statistics.median(one) for name, one in taken.items()}
    tell(f"{dtype}: decoding")
    decode = _decode(ll, prompt, options)
    rows = [{"dtype": dtype, "arm": name, "ms": one * 1000} for name, one in median.items()]
    rows += [{"dtype": dtype, "arm": name, "ms": one * 1000} for name, one in decode.items()]
    copy = median["copy of the reused KV"]
    full_stock, first_stock = median["transformers, text rows"], median["transformers, text + 32 an image"]
    full, first = median["full-reuse"], median["first-k:32"]
    summary = {
        "tokens": {"all": len(built), "reused": reused, "text": text},
        "reprefill_over_transformers": median["reprefill"] / median["transformers, all rows"],
        "decode_over_transformers": decode["decode alone"] / decode["generate alone"],
        "decode8_over_transformers": decode["decode 8"] / decode["generate 8"],
        "reuse_over_floor": full / (full_stock + copy),
        "first_k_over_floor": first / (first_stock + copy),
        "reuse_over_bar": full / (1.25 * full_stock + 1.5 * copy),
        "first_k_over_bar": first / (1.25 * first_stock + 1.5 * copy),
        "full_reuse_speedup": median["reprefill"] / full,
        "first_k_speedup": median["reprefill"] / first,
        "patched_speedup": median["reprefill"] / median["patched 25%"],
        "patched6_over_reuse": median["patched 6%"] / full,
        "patched25_over_reuse": median["patched 25%"] / full,
    }
    return rows, summary


def make_prompt(seed: int) -> list[Segment]:
    """Four images between words, 64 rows of text in all with the template's."""
    chance = np.random.default_rng(seed)
    images = [
        Image(PILImages.fromarray(chance.integers(0, 255, (SIDE, SIDE, 3), dtype=np.uint8))) for _ in range(IMAGES)
    ]
    words = ["first", "then", "and", "so", "Please compare these with the other one and say"]
    return [*(piece for pair in zip(words, images, strict=False) for piece in pair), words[-1]]


def first_token(ll: Looseleaf, prompt: list[Segment], policy: Policy) -> Callable[[], float]:
    """Seconds from the moment the engine gets the request to its only token."""
    request = ll.request(prompt, policy=policy, max_tokens=1)

    def once() -> float:
        started = time.perf_counter()
        _finish(ll, [ll.engine.submit(request)])
        return time.perf_counter() - started

    return once


def _finish(ll: Looseleaf, jobs: list[Job]) -> None:
    while ll.engine.step():
        pass
    sync(ll)
    for job in jobs:
        if job.error is not None:
            raise job.error


def sync(ll: Looseleaf) -> None:
    """Wait for the device, if it is one that runs on by itself."""
    if ll.adapter.device.type == "cuda":
        torch.cuda.synchronize()


def stock_rows(ll: Looseleaf, rows: int, context: int) -> Callable[[], float]:
    """Transformers' own decoder on `rows` rows behind `context` cached ones, down to the last row's logits."""
    parts, width = ll.adapter.decoder.parts, ll.adapter.model.config.get_text_config().hidden_size
    hidden = torch.randn(1, rows, width, dtype=ll.adapter.layout.dtype, device=ll.adapter.device)

    @torch.inference_mode()
    def once() -> float:
        cache = _context(ll, 1, context) if context else DynamicCache()
        positions = torch.arange(context, context + rows, device=ll.adapter.device).expand(ll.adapter.axes, 1, -1)
        with stock_attention(ll.adapter.decoder):
            sync(ll)
            started = time.perf_counter()
            out = parts.text(inputs_embeds=hidden, position_ids=positions, past_key_values=cache, use_cache=True)
            parts.head(out.last_hidden_state[:, -1:])
            sync(ll)
            return time.perf_counter() - started

    return once


def copy_rows(ll: Looseleaf, tokens: int) -> Callable[[], float]:
    """Seconds to read and write the KV of so many tokens once."""
    count = tokens * ll.adapter.layout.row_bytes // ll.adapter.layout.dtype.itemsize
    source = torch.randn(count, device=ll.adapter.device).to(ll.adapter.layout.dtype)
    target = torch.empty_like(source)

    def once() -> float:
        sync(ll)
        started = time.perf_counter()
        target.copy_(source)
        sync(ll)
        return time.perf_counter() - started

    return once


def _decode(ll: Looseleaf, prompt: list[Segment], options: BenchOptions) -> dict[str, float]:
    """Seconds a token while decoding behind this prompt, ours and `generate`'s, alone and eight at once."""
    tokens, rounds = (6, 1) if options.quick else (32, 9)
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for count, name in ((1, "alone"), (8, "8")):
            taken.setdefault(f"decode {name}", []).append(_our_decode(ll, prompt, count, tokens))
            taken.setdefault(f"generate {name}", []).append(_their_decode(ll, prompt, count, tokens))
    return {name: statistics.median(one) for name, one in taken.items()}


def _our_decode(ll: Looseleaf, prompt: list[Segment], count: int, tokens: int) -> float:
    request = ll.request(prompt, policy=FullReuse(), max_tokens=tokens + 1, ignore_eos=True)
    jobs = [ll.engine.submit(request) for _ in range(count)]
    ll.engine.step()  # links and prefills every request of the batch, and answers its first token
    sync(ll)
    started = time.perf_counter()
    _finish(ll, jobs)
    return (time.perf_counter() - started) / tokens


@torch.inference_mode()
def _their_decode(ll: Looseleaf, prompt: list[Segment], count: int, tokens: int) -> float:
    """`generate`'s time from its first token to its last, behind a cache as long as the prompt (random: only time)."""
    ids = torch.tensor([ll.builder.build(prompt).ids] * count, device=ll.adapter.device)
    cache, clock = _context(ll, count, ids.shape[1] - 1), _Clock(ll)
    with stock_attention(ll.adapter.decoder):
        ll.adapter.model.generate(
            input_ids=ids, past_key_values=cache, max_new_tokens=tokens + 1, do_sample=False, eos_token_id=None,
            pad_token_id=0, stopping_criteria=[clock],
        )  # fmt: skip
    return (clock.seen[-1] - clock.seen[0]) / tokens


def _context(ll: Looseleaf, count: int, tokens: int) -> DynamicCache:
    """A stock cache of random rows."""
    cache = DynamicCache()
    for index, layer in enumerate(ll.adapter.layout.layers):
        shape = (count, layer.keys.heads, tokens, layer.keys.dim)
        keys = torch.randn(shape, dtype=ll.adapter.layout.dtype, device=ll.adapter.device)
        cache.update(keys, torch.randn_like(keys), index)
    return cache


class _Clock:
    """A stopping criterion that never stops and notes when each token came."""

    def __init__(self, ll: Looseleaf) -> None:
        self.seen: list[float] = []
        self._ll = ll

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        sync(self._ll)
        self.seen.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def plot(report: Report, path: Path) -> None:
    """Bars of milliseconds by arm, one panel a dtype."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    for axes, dtype in zip(figure.subplots(1, 2), ("float32", "bfloat16"), strict=True):
        rows = [row for row in report.rows if row["dtype"] == dtype][::-1]
        bars = axes.barh([row["arm"] for row in rows], [row["ms"] for row in rows], color="#3f6fd8")
        axes.bar_label(bars, fmt="%.0f", padding=3)
        axes.set_title(f"{dtype}: milliseconds")
        axes.margins(x=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
