"""How fast is a stored segment bound, beside computing it?

A random-weight model of Qwen2.5-VL-7B's dimensions in bf16 (on a CPU one of SmolLM size), one image of 256 to 2,048
tokens. The segment alone: its rows computed by transformers' own forward, against its stored rows bound into a table at
another place, blind and with a patch of a quarter of its bytes; the floor is its KV read and written once. The whole
time to the first token with about 44 tokens of template and question: computed, reused and patched; the floor is all
weights read once at the speed a copy has. Everything alternates in one process; medians. Features are stored, so the
vision tower is apart. On a GPU also how long it worked: the rest of the time it waited for Python.
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
from transformers import AutoModelForImageTextToText

from looseleaf.bench.report import BenchOptions, Report
from looseleaf.bench.ttft import SMOL, copy_rows, first_token, stock_rows, sync
from looseleaf.config import Config
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import ChunkKV, Patch
from looseleaf.link.bind import binder
from looseleaf.link.bound import Bound
from looseleaf.link.policies import FullReuse, Patched, Reprefill
from looseleaf.model.adapter import Adapter
from looseleaf.model.family import family_of
from looseleaf.model.probe import build_decoder
from looseleaf.model.processors import load_processor
from looseleaf.model.tiny import build_tiny
from looseleaf.model.tiny.build import tiny_config
from looseleaf.patch.form import form_patch
from looseleaf.prompt.chunks import Span
from looseleaf.prompt.segments import Image, Segment
from looseleaf.system import Looseleaf

FAMILY = "qwen2_5_vl"
SEVEN_B = {
    "text_config.num_hidden_layers": 28, "text_config.hidden_size": 3584, "text_config.num_attention_heads": 28,
    "text_config.num_key_value_heads": 4, "text_config.intermediate_size": 18944, "text_config.vocab_size": 152064,
    "text_config.rope_parameters": {"mrope_section": [16, 24, 24]}, "vision_config.out_hidden_size": 3584,
}  # fmt: skip
"""The text model of Qwen2.5-VL-7B; the vision tower stays small, as it is not timed."""
GRIDS = {256: (16, 16), 512: (16, 32), 1024: (32, 32), 2048: (32, 64)}
"""Merged patches down and across by tokens of an image."""
SIDE = 28
"""Pixels of a merged patch."""
QUESTION = "What is there?"
SHARE = 0.25
"""Of the segment's bytes that its patch takes."""
ROUNDS = 21
KERNELS = 8
"""Of which the time on a GPU is told apart."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """A row for every length; the summary by length."""
    report = Report(bench="segment", options=options)
    busy: dict[int, dict[str, dict[str, float]]] = {}
    on_gpu = options.device.startswith("cuda")
    tell("making a random model")
    sizes = SEVEN_B if on_gpu and not options.quick else SMOL
    with open_random(options.device, sizes, "bfloat16" if on_gpu else "float32") as ll:
        parts = ll.adapter.decoder.parts
        weights = sum(one.nbytes for one in parts.layers.parameters()) + parts.head.weight.nbytes
        for tokens in tuple(GRIDS)[: 1 if options.quick else None]:
            tell(f"{tokens} tokens")
            row, busy[row["tokens"]] = time_segment(ll, tokens, weights, options)
            report.rows.append(row)
    if on_gpu:
        report.details["busy_ms"] = {
            tokens: {arm: sum(kernels.values()) for arm, kernels in arms.items()} for tokens, arms in busy.items()
        }
        report.details["kernels_ms"] = busy[report.rows[-1]["tokens"]]
    report.summary = {
        "link_speedup": {row["tokens"]: row["prefill_ms"] / row["link_ms"] for row in report.rows},
        "patched_link_speedup": {row["tokens"]: row["prefill_ms"] / row["patched_link_ms"] for row in report.rows},
        "link_over_floor": {row["tokens"]: row["link_ms"] / row["copy_ms"] for row in report.rows},
        "ttft_speedup": {row["tokens"]: row["ttft_reprefill_ms"] / row["ttft_patched_ms"] for row in report.rows},
        "ttft_over_weights": {row["tokens"]: row["ttft_patched_ms"] / row["weights_ms"] for row in report.rows},
        "parameters": sum(one.numel() for one in ll.adapter.model.parameters()),
        "dtype": ll.dtype,
    }
    return report


def open_random(device: str, sizes: dict[str, Any], dtype: str) -> Looseleaf:
    """A model that is drawn on its device and never written."""
    config = tiny_config(FAMILY, sizes)
    with tempfile.TemporaryDirectory() as folder:
        processor = load_processor(build_tiny(FAMILY, Path(folder)))
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
    decoder = build_decoder(model)
    adapter = Adapter(model, processor, decoder, family_of(config.model_type), name="random", max_length=8192)
    widest = max(rows * columns for rows, columns in GRIDS.values()) * SIDE**2
    adapter.processor.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": widest}
    # one pass for a whole prompt: a chunked prefill would be compared with an unchunked one
    return Looseleaf(adapter, Config(engine=EngineConfig(max_rows=8192)))


def time_segment(
    ll: Looseleaf, tokens: int, weights: int, options: BenchOptions
) -> tuple[dict[str, Any], dict[str, dict[str, float]]]:
    """One length: milliseconds by arm, and those its GPU worked, by kernel."""
    rows, columns = GRIDS[tokens]
    noise = np.random.default_rng(options.seed).integers(0, 255, (rows * SIDE, columns * SIDE, 3), dtype=np.uint8)
    prompt: list[Segment] = ["See", Image(PILImages.fromarray(noise)), QUESTION]
    ll.warm([prompt[1]])
    built = ll.builder.build(prompt)
    (span,) = built.chunks
    stored, patch = _stored(ll, span)
    arms: dict[str, Callable[[], float]] = {
        "copy": copy_rows(ll, len(span)),
        "prefill": stock_rows(ll, len(span), 0),
        "link": _bind(ll, span, stored, None),
        "patched_link": _bind(ll, span, stored, patch),
        "ttft_reprefill": first_token(ll, prompt, Reprefill()),
        "ttft_reuse": first_token(ll, prompt, FullReuse()),
        "ttft_patched": first_token(ll, prompt, Patched(share=SHARE)),
    }
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(3):  # the first call of each compiles, or leaves its patch behind
        for arm in arms.values():
            arm()
        ll.settle()
    for _ in range(2 if options.quick else ROUNDS):
        for name, arm in arms.items():
            taken[name].append(arm())
    for policy in (FullReuse(), Patched(share=SHARE)):
        count = ll.plan(prompt, policy=policy).count()
        assert count.patched + count.relocated == len(span), "what should have been read was computed"
    median = {f"{name}_ms": statistics.median(one) * 1000 for name, one in taken.items()}
    row = {
        "tokens": len(span), "question": len(built) - len(span), "kv_mb": len(span) * ll.adapter.layout.row_bytes / 1e6,
        **median, "weights_ms": weights / _bandwidth(ll) * 1000,
    }  # fmt: skip
    return row, {name: _busy(ll, arm) for name, arm in arms.items()}


def _busy(ll: Looseleaf, arm: Callable[[], float]) -> dict[str, float]:
    """Milliseconds a GPU spends on an arm by kernel, the longest few first; nothing on a CPU."""
    if ll.adapter.device.type != "cuda":
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        arm()
    spent = {one.key: one.self_device_time_total / 1000 for one in seen.key_averages()}
    first = sorted(spent, key=lambda kernel: -spent[kernel])
    rest = sum(spent[kernel] for kernel in first[KERNELS:])
    return {kernel[:60]: spent[kernel] for kernel in first[:KERNELS]} | {"others": rest}


def _bandwidth(ll: Looseleaf) -> float:
    """Bytes a second that a copy too large for any cache reads and writes."""
    size = 2**30 if ll.adapter.device.type == "cuda" else 2**27
    source = torch.zeros(size, dtype=torch.uint8, device=ll.adapter.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(5):
        sync(ll)
        started = time.perf_counter()
        target.copy_(source)
        sync(ll)
        seconds.append(time.perf_counter() - started)
    return 2 * size / statistics.median(seconds)


def _stored(ll: Looseleaf, span: Span) -> tuple[KVRows, Patch]:
    """The segment's rows, and a patch of the form asked for; of random numbers, as only time is asked for."""
    assert span.chunk is not None
    record = ll.store.get(ll.linker.keys.kv(span.chunk))
    assert isinstance(record, ChunkKV)
    other = KVRows(record.rows.layout, record.rows.tokens, record.rows.device)
    for plane in (*other.keys, *other.values):
        plane.normal_()
    return record.rows, form_patch(other, record.rows, share=SHARE)


def _bind(ll: Looseleaf, span: Span, stored: KVRows, patch: Patch | None) -> Callable[[], float]:
    """The stored rows at another place of a table, phases included."""
    decoder, table = ll.adapter.decoder, KVRows(ll.adapter.layout, span.stop, ll.adapter.device)
    assert span.chunk is not None
    positions = span.chunk.placement.positions.to(ll.adapter.device) + span.start_pos
    bound = [Bound(slots=slice(span.start, span.stop), rows=stored, patch=patch)]

    @torch.inference_mode()
    def once() -> float:
        sync(ll)
        started = time.perf_counter()
        bind = binder(table, bound, decoder.phase(positions), decoder.form)
        for layer in range(len(ll.adapter.layout.layers)):
            bind(layer)
        sync(ll)
        return time.perf_counter() - started

    return once


def plot(report: Report, path: Path) -> None:
    """Left: the segment alone by length. Right: the whole time to the first token."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    tokens = [row["tokens"] for row in report.rows]
    alone = {"prefill": "computed", "patched_link": "bound, patched", "link": "bound", "copy": "KV read and written"}
    whole = {"ttft_reprefill": "computed", "ttft_patched": "patched", "ttft_reuse": "reused", "weights": "weights read"}
    panels = (("the segment alone, ms", alone), ("time to the first token, ms", whole))
    for axes, (title, arms) in zip(figure.subplots(1, 2), panels, strict=True):
        for arm, label in arms.items():
            style = ":" if arm in ("copy", "weights") else "o-"
            axes.plot(tokens, [row[f"{arm}_ms"] for row in report.rows], style, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the segment", title=title)
        axes.set_xticks(tokens, [str(one) for one in tokens])
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
