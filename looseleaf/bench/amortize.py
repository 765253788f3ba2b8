"""After how many reuses is a patch paid?

The model and prompt of `ttft`: four images of 256 tokens. The first request computes everything; what it leaves behind
(each image alone, once, then its patch, formed and stored) is paid before anything is saved. Every reuse then costs a
patched request in place of a re-prefill. Counted in rows that go through the model and in seconds, vision apart
(features are stored). Without harvest, as the papers do it, a conditioned forward is paid for the patch as well. An
orbit over all orders of the three images in front needs patches of every order and their mean: with harvest requests
leave those patches behind as they come, without it every order is computed for them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from looseleaf.bench.report import BenchOptions, Report
from looseleaf.bench.ttft import IMAGES, SIDE, SMOL, make_prompt, sync
from looseleaf.config import Config
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.kv.records import Patch
from looseleaf.link.linker import Keep
from looseleaf.link.policies import Patched, Policy, Reprefill
from looseleaf.model.adapter import Adapter
from looseleaf.model.loading import load_adapter
from looseleaf.model.tiny import build_tiny
from looseleaf.patch.orbit import merge
from looseleaf.prompt.segments import Image, Segment
from looseleaf.system import Looseleaf

ROUNDS, QUICK_ROUNDS = 7, 1
REUSES = 8
"""Drawn in the plot."""
ORDERS = math.factorial(IMAGES - 1)
"""Of the images in front of the last one."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Both dtypes, rows and seconds."""
    report = Report(bench="amortize", options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.model) if options.model else build_tiny("qwen2_5_vl", Path(folder) / "smol", overrides=SMOL)
        for dtype in ("float32", "bfloat16"):
            adapter = load_adapter(path, dtype=dtype, device=options.device)
            adapter.processor.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
            for unit, costs in measure(adapter, dtype, options, tell).items():
                report.rows.append({"dtype": dtype, "unit": unit, **costs, **break_even(costs)})
    keys = ("break_even_reuses", "break_even_without_harvest", "break_even_orbit", "break_even_orbit_without_harvest")
    report.summary = {
        key: {
            f"{row['dtype']} {row['unit']}": None if row[key] is None else math.ceil(row[key] - 1e-9)
            for row in report.rows
        }
        for key in keys
    }
    return report


def measure(
    adapter: Adapter, dtype: str, options: BenchOptions, tell: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Costs by unit: medians of alternating rounds, each with a store of its own."""
    prompt = make_prompt(options.seed)
    taken: dict[str, list[float]] = {}
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    for number in range(rounds):
        tell(f"{dtype}: round {number + 1} of {rounds}")
        for name, spent in one_round(adapter, prompt).items():
            taken.setdefault(name, []).append(spent)
    seconds = {name: statistics.median(each) for name, each in taken.items()}
    ll = _fresh(adapter)
    built = ll.builder.build(prompt)
    alone = sum(len(ll.linker.canonical.ids) + len(span) for span in built.chunks)
    text = len(built) - sum(len(span) for span in built.chunks)
    rows = {"re-prefill": len(built), "patched": text, "alone": alone, "forming": 0, "merging": 0}
    return {"rows": {name: float(count) for name, count in rows.items()}, "seconds": seconds}


def one_round(adapter: Adapter, prompt: list[Segment]) -> dict[str, float]:
    """Seconds of a re-prefill, the chunks alone, forming and storing patches, a patched request, a merge of them."""
    ll = _fresh(adapter)
    _ask(ll, prompt, Reprefill())  # features
    found = {"re-prefill": _ask(ll, prompt, Reprefill())}
    _ask(ll, prompt, Patched())
    found["alone"] = _timed(ll, lambda: ll.warm([one for one in prompt if isinstance(one, Image)]))
    found["forming"] = _timed(ll, ll.settle)
    _ask(ll, prompt, Patched())
    found["patched"] = _ask(ll, prompt, Patched())
    patches = _patches(ll, prompt)
    found["merging"] = _timed(ll, lambda: [merge(one, 1, one, 1) for one in patches])
    ll.close()
    return found


def _patches(ll: Looseleaf, prompt: list[Segment]) -> list[Patch]:
    """Those the prompt's images have behind each other."""
    linked = ll.linker.link(ll.builder.build(prompt), ll.plan(prompt, policy=Patched()), capacity=8192, keep=Keep())
    linked.release()
    return list(linked.patches.values())


def _fresh(adapter: Adapter) -> Looseleaf:
    return Looseleaf(adapter, Config(engine=EngineConfig(max_rows=8192)))


def _ask(ll: Looseleaf, prompt: list[Segment], policy: Policy) -> float:
    """Step the engine until the answer is out, and no further: what it leaves behind is timed by itself."""
    request = ll.request(prompt, policy=policy, max_tokens=1)

    def once() -> None:
        job = ll.engine.submit(request)
        while not job.done.is_set():
            ll.engine.step()

    return _timed(ll, once)


def _timed(ll: Looseleaf, act: Callable[[], object]) -> float:
    sync(ll)
    started = time.perf_counter()
    act()
    sync(ll)
    return time.perf_counter() - started


def break_even(costs: Mapping[str, float]) -> dict[str, float | None]:
    """Reuses after which what was paid beforehand is back; None where a patched request saves nothing."""
    saved = costs["re-prefill"] - costs["patched"]
    harvest = costs["alone"] + costs["forming"]
    orbit = costs["alone"] + ORDERS * costs["forming"] + (ORDERS - 1) * costs["merging"]
    paid = {
        "break_even_reuses": harvest,
        "break_even_without_harvest": harvest + costs["re-prefill"],
        "break_even_orbit": orbit,
        "break_even_orbit_without_harvest": orbit + ORDERS * costs["re-prefill"],
    }
    return {name: cost / saved if saved > 0 else None for name, cost in paid.items()}


def plot(report: Report, path: Path) -> None:
    """Total seconds by number of reuses: re-prefill, patches by harvest, patches paid for."""
    rows = [row for row in report.rows if row["unit"] == "seconds"]
    figure = Figure(figsize=(5.5 * len(rows), 4), layout="constrained")
    reuses = range(REUSES + 1)
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        first, harvest = row["re-prefill"], row["alone"] + row["forming"]
        curves: dict[str, Any] = {
            "re-prefill": [first * (n + 1) for n in reuses],
            "patched, harvested": [first + harvest + n * row["patched"] for n in reuses],
            "patched, without harvest": [2 * first + harvest + n * row["patched"] for n in reuses],
        }
        for name, curve in curves.items():
            axes.plot(reuses, curve, marker="o", label=name)
        axes.set(xlabel="reuses", ylabel="seconds in all", title=row["dtype"], ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
