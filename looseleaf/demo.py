"""`looseleaf demo`: four pictures asked about twice, the second time moved, under several policies.

Uses a random-weight model of SmolLM's size, so that there is something to save: the words it answers mean nothing, the
seconds, the counts and the distances to transformers' own forward do. Saves a picture of what the model looked at and a
plot of the times.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image as PILImages
from PIL import ImageDraw
from PIL.Image import Image as PILImage
from rich.console import Console
from rich.table import Table

from looseleaf.bench.ttft import SIDE, SMOL
from looseleaf.config import Config
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.link.policies import FirstK, FullReuse, LayerAdaptive, Policy, PrefixCache, Reprefill, policy_name
from looseleaf.link.reference import error
from looseleaf.model.loading import load_adapter
from looseleaf.model.tiny import build_tiny
from looseleaf.prompt.segments import Image, Segment
from looseleaf.system import Looseleaf

COLOURS = ["#d94141", "#3c9d4e", "#3f6fd8", "#e0b93a", "#8e4bb8", "#e07b2f"]
SHOWN: tuple[Policy, ...] = (
    Reprefill(), PrefixCache(), FirstK(k=32), LayerAdaptive(ratio=0.1), FullReuse(),
)  # fmt: skip


def run_demo(out: Path, seed: int, tell: Callable[[str], None]) -> None:
    """Draw, ask, move, ask again; print and save what happened."""
    console = Console(highlight=False, width=max(110, Console().width))
    out.mkdir(parents=True, exist_ok=True)
    pictures = [draw_picture(seed * 100 + number) for number in range(4)]
    sheet = PILImages.new("RGB", (SIDE * 4, SIDE), "white")
    for number, picture in enumerate(pictures):
        sheet.paste(picture, (SIDE * number, 0))
    sheet.save(out / "pictures.png")
    tell("building a random-weight Qwen2.5-VL of SmolLM size")
    with tempfile.TemporaryDirectory() as folder:
        path = build_tiny("qwen2_5_vl", Path(folder) / "smol", overrides=SMOL)
        adapter = load_adapter(path, tell=tell)
    adapter.processor.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    console.print(
        "A Qwen2.5-VL with random weights, 30 layers of width 576: its words mean nothing, the times and counts do.\n"
        f"It looks at four pictures ({out / 'pictures.png'}), 256 tokens each, then sees them again in another order.\n"
    )
    with Looseleaf(adapter, Config(engine=EngineConfig(max_rows=4096))) as ll:
        times = _ask_twice(ll, [Image(one) for one in pictures], console, tell)
    _plot(times, out / "ttft.png")
    console.print(f"Saved {out / 'pictures.png'} and {out / 'ttft.png'}.")


def _ask_twice(ll: Looseleaf, images: list[Image], console: Console, tell: Callable[[str], None]) -> dict[str, float]:
    first: list[Segment] = [*images, "What changed?"]
    second: list[Segment] = ["Look at", images[2], "then", images[0], "and", images[3], "or", images[1], "and compare."]
    tell("the first look: vision tower and a full prefill")
    answer = ll.ask(first, policy=Reprefill(), max_tokens=8)
    console.print(f"[bold]First look[/], everything computed: {answer.usage}\n")
    tell("computing the pictures alone")
    ll.warm(images)
    tell("transformers' own forward, for comparison")
    given = ll.reference.stock(second)
    plain, blind = ll.reference.logits(given)[-1], ll.reference.blind(given)
    console.print("[bold]Second look[/], moved. What FirstK would do:")
    console.print(str(ll.plan(second, policy=FirstK(k=32))) + "\n")
    heads = ("policy", "exact", "relocated", "recomputed", "fresh", "first token", "faster", "off a plain forward")
    table = Table(*heads)
    times: dict[str, float] = {}
    for policy in SHOWN:
        name = policy_name(policy)
        tell(f"asking with {name}")
        usage = min(
            (ll.ask(second, policy=policy, max_tokens=1, no_store=True).usage for _ in range(2)),
            key=lambda one: one.timing.ttft_s,
        )
        times[name] = usage.timing.ttft_s - usage.timing.prepare_s
        off = error(ll.reference.ours(given.prompt, policy), plain)
        table.add_row(
            name, str(usage.exact_tokens), str(usage.relocated_tokens), str(usage.recomputed_tokens),
            str(usage.fresh_tokens), f"{times[name] * 1000:.0f} ms", f"{times['reprefill'] / times[name]:.1f}x",
            f"{off:.0e} {'~' if usage.approximate else '='}",
        )  # fmt: skip
    console.print(table)
    off = error(ll.reference.ours(given.prompt, FullReuse()), blind)
    console.print(
        f"Full reuse differs from a plain forward in which the pictures cannot see each other by {off:.0e}: moving is\n"
        "exact. What it loses is what the pictures absorbed from each other; patches will restore that.\n"
    )
    return times


def draw_picture(seed: int) -> PILImage:
    """A 4 x 4 grid of coloured shapes."""
    chance = np.random.default_rng(seed)
    picture = PILImages.new("RGB", (SIDE, SIDE), "#f6f4ef")
    pen = ImageDraw.Draw(picture)
    cell = SIDE // 4
    for at in range(16):
        left, top = (at % 4) * cell, (at // 4) * cell
        middle, radius = (left + cell / 2, top + cell / 2), cell * 0.36
        colour = str(chance.choice(COLOURS))
        corners = int(chance.choice([3, 4, 5, 6, 40]))
        turn = -math.pi / 2
        points = [
            (middle[0] + radius * math.cos(turn + 2 * math.pi * n / corners),
             middle[1] + radius * math.sin(turn + 2 * math.pi * n / corners))
            for n in range(corners)
        ]  # fmt: skip
        pen.polygon(points, fill=colour)
    return picture


def _plot(times: dict[str, float], path: Path) -> None:
    figure = Figure(figsize=(7, 2.8), layout="constrained")
    axes = figure.subplots()
    names = list(times)[::-1]
    bars = axes.barh(names, [times[name] * 1000 for name in names], color="#3f6fd8")
    axes.bar_label(bars, fmt="%.0f ms", padding=3)
    axes.set_xlabel("milliseconds to the first token (four moved pictures of 256 tokens)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    figure.savefig(path, dpi=150)
