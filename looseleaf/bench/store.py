"""What does a store's read cost, and does loading go on beside computing?

*Reading:* records of a model of Qwen2.5-VL-7B's dimensions (1,024 tokens, 59 MB) from a folder, checksums compared and
ready to be bound, against a plain read of the same files; the page cache warm, and dropped before every read.
*Loading beside computing:* a model of SmolLM size is asked about four images of which two are stored, on a medium so
slow that loading them takes as long as computing the other two. Whole requests: the two that must be computed alone,
the two that must be loaded alone, and all four. Loading (a thread that waits for the medium and compares checksums)
overlaps with the vision tower and the chunks' own forward, but not with what follows both: binding and the last pass.
"""

from __future__ import annotations

import os
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

from looseleaf.bench.report import BenchOptions, Report
from looseleaf.bench.ttft import SIDE, SMOL
from looseleaf.config import Config
from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.kv.records import ChunkKV
from looseleaf.link.policies import FullReuse
from looseleaf.model.adapter import Adapter
from looseleaf.model.loading import load_adapter
from looseleaf.model.tiny import build_tiny
from looseleaf.prompt.segments import Image
from looseleaf.store.disk import DiskStore
from looseleaf.store.medium import RatedMedium
from looseleaf.store.protocol import Key
from looseleaf.store.tiered import TieredStore
from looseleaf.system import Looseleaf

ROUNDS, QUICK_ROUNDS = 9, 2
LAYERS, HEADS, DIM, TOKENS, FILES = 28, 4, 128, 1024, 4
"""Of the records that are read."""
HALF = 2
"""Images that are stored, and images that are not."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Two tables in one: reads, then the three requests."""
    report = Report(bench="store", options=options)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder:
        tell("reading")
        reads = time_reads(Path(folder) / "read", rounds)
        report.rows += [{"what": f"{how} read, {cache}", **figures} for (how, cache), figures in reads.items()]
        tell("loading beside computing")
        path = build_tiny("qwen2_5_vl", Path(folder) / "smol", overrides=SMOL)
        adapter = load_adapter(path, dtype="float32", device=options.device)
        adapter.processor.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
        seconds, rate = time_requests(adapter, Path(folder) / "store", rounds, options.seed)
    report.rows += [{"what": name, "s": value} for name, value in seconds.items()]
    longer = max(seconds["load two"], seconds["compute two"])
    report.summary = {
        **{f"{cache}_over_plain": reads["checked", cache]["gb_s"] / reads["plain", cache]["gb_s"]
           for cache in ("warm", "cold")},
        "load_over_compute": seconds["load two"] / seconds["compute two"],
        "both_over_longer": seconds["load two, compute two"] / longer,
        "one_after_the_other": (seconds["load two"] + seconds["compute two"]) / longer,
        "medium_mb_s": rate / 1e6,
    }  # fmt: skip
    return report


def time_reads(folder: Path, rounds: int) -> dict[tuple[str, str], dict[str, Any]]:
    """Medians by way and state of the page cache."""
    plane = Plane(heads=HEADS, dim=DIM)
    layout = KVLayout(layers=(LayerLayout(keys=plane, values=plane),) * LAYERS, dtype=torch.bfloat16)
    rows = KVRows(layout, TOKENS)
    for one in (*rows.keys, *rows.values):
        one.normal_()
    store = DiskStore(folder, 2**40)
    keys = [Key(f"record {number}", "kv") for number in range(FILES)]
    for key in keys:
        assert store.put(key, ChunkKV(rows=rows))
    paths = [store.path(key) for key in keys]
    size = sum(path.stat().st_size for path in paths)

    def checked() -> None:
        for key in keys:
            assert store.get(key) is not None

    def plain() -> None:
        for path in paths:
            path.read_bytes()

    taken: dict[tuple[str, str], list[float]] = {}
    for _ in range(rounds):
        for cache in ("warm", "cold"):
            for how, read in (("checked", checked), ("plain", plain)):
                if cache == "cold":
                    _drop_cache(paths)
                started = time.perf_counter()
                read()
                taken.setdefault((how, cache), []).append(time.perf_counter() - started)
    store.close()
    return {
        which: {"gb_s": size / statistics.median(each) / 1e9, "s": statistics.median(each)}
        for which, each in taken.items()
    }


def _drop_cache(paths: list[Path]) -> None:
    """Ask the system to forget these files; where it cannot, cold is as warm."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def time_requests(adapter: Adapter, folder: Path, rounds: int, seed: int) -> tuple[dict[str, float], float]:
    """Median seconds of the three requests, and the medium's bytes a second."""
    chance = np.random.default_rng(seed)

    def drawn() -> list[Image]:
        noise = chance.integers(0, 255, (HALF, SIDE, SIDE, 3), dtype=np.uint8)
        return [Image(PILImages.fromarray(one)) for one in noise]

    with Looseleaf(adapter, Config(store=str(folder))) as ll:
        store = ll.store
        assert isinstance(store, TieredStore)
        stored = drawn()
        ll.warm(stored)
        ll.ask(["Compare", *drawn(), "now"], policy=FullReuse(), max_tokens=1)  # the first pass is slow
        store.flush()
        records = [entry for entry in store.disk.entries() if entry.kind == "chunk-kv"][:HALF]

        def ask(images: list[Image], *, at_hand: bool = False) -> float:
            for entry in [] if at_hand else records:
                store.memory.delete(entry.key)
            started = time.perf_counter()
            ll.ask(["Compare", *images, "now"], policy=FullReuse(), max_tokens=1, no_store=True)
            return time.perf_counter() - started

        alone, rest = [], []
        for _ in range(max(3, rounds // 2)):
            alone.append(ask(drawn()))
            rest.append(ask(stored, at_hand=True))
        rate = sum(entry.size_bytes for entry in records) / (statistics.median(alone) - statistics.median(rest))
        store.disk.medium = RatedMedium(rate)
        taken: dict[str, list[float]] = {}
        for _ in range(rounds):
            for name, images in (
                ("compute two", drawn()), ("load two", stored), ("load two, compute two", [*stored, *drawn()]),
            ):  # fmt: skip
                taken.setdefault(name, []).append(ask(images))
        assert store.stats().disk_hits >= HALF * rounds, "nothing was loaded"
    return {name: statistics.median(each) for name, each in taken.items()}, rate


def plot(report: Report, path: Path) -> None:
    """Left: reads. Right: the three requests."""
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    reads = [row for row in report.rows if "gb_s" in row]
    left.barh([row["what"] for row in reads][::-1], [row["gb_s"] for row in reads][::-1], color="0.6")
    left.set(xlabel="GB/s")
    asked = [row for row in report.rows if "gb_s" not in row]
    right.barh([row["what"] for row in asked][::-1], [row["s"] for row in asked][::-1], color="0.6")
    right.set(xlabel="seconds to the first token")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
