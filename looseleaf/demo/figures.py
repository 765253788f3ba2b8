"""The picture of what the model looked at and answered, and the plot of accuracy and time by policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from looseleaf.bench.report import Share
from looseleaf.demo.items import Item
from looseleaf.demo.measure import Asked
from looseleaf.prompt.media import MediaLimits, read_picture
from looseleaf.prompt.segments import Image

GREEN, RED, BLUE, GREY = "#2f8f4e", "#c8372d", "#3f6fd8", "#777777"
COLOURS = (BLUE, RED, "#e8862e", "#8e4bb8", "#3a9d8f", "#b5a53a")


def plain(text: str, most: int = 60) -> str:
    """Words that any terminal and font can show."""
    words = "".join(one if " " <= one <= "~" else "?" for one in " ".join(text.split()))
    return words if len(words) <= most else words[: most - 3] + "..."


def draw_album(items: Sequence[Item], answers: Sequence[Asked], heading: str, path: Path) -> None:
    """The images side by side; under them each question with the right answer and every policy's."""
    images = items[0].images
    policies = list(dict.fromkeys(one.policy for one in answers))
    figure = Figure(figsize=(11, 2.9 + 0.58 * len(items)), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(2.4, 0.5 + 0.58 * len(items)))
    upper, lower = parts
    upper.suptitle(heading, fontsize=11)
    needed = {at for item in items for at in item.question.needs if item.question.hops > 1}
    for at, (axes, segment) in enumerate(zip(upper.subplots(1, len(images), squeeze=False)[0], images, strict=True)):
        axes.set_axis_off()
        title = f"image {at + 1}" + (", needed for multi-hop" if at in needed else "")
        axes.set_title(title, fontsize=9, color=BLUE if at in needed else GREY)
        if isinstance(segment, Image):
            axes.imshow(read_picture(segment, MediaLimits()).pixels)
        else:
            axes.text(0, 0.5, plain(str(segment), 200), fontsize=7, wrap=True, parse_math=False)
    axes = lower.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 1 + len(policies))
    axes.set_ylim(2 * len(items), -1)
    for column, name in enumerate(["right answer", *policies]):
        axes.text(column, -0.5, name, fontsize=9, weight="bold", va="center")
    for row, item in enumerate(items):
        hops = "single-hop" if item.question.hops == 1 else "multi-hop"
        text = f"{item.question.text}  ({hops})"
        axes.text(0, 2 * row + 0.5, text, fontsize=9, color=GREY, va="center", parse_math=False)
        axes.text(0, 2 * row + 1.2, item.question.answer, fontsize=9, va="center", parse_math=False)
        for one in answers:
            if one.item is item:
                at, colour = 1 + policies.index(one.policy), GREEN if one.right else RED
                axes.text(
                    at,
                    2 * row + 1.2,
                    plain(one.said, 16) + ("" if one.right else " ✗"),
                    fontsize=9,
                    color=colour,
                    va="center",
                    parse_math=False,
                )
    figure.savefig(path, dpi=130)


def plot_policies(columns: Mapping[str, Mapping[str, Share]], ttft_s: Mapping[str, float], path: Path) -> None:
    """Left: shares of right answers by policy, one bar a column, with intervals. Right: time to the first token."""
    names = list(ttft_s)
    figure = Figure(figsize=(11, 1.2 + 0.62 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
    height = 0.8 / len(columns)
    for number, (label, shares) in enumerate(columns.items()):
        values = [shares[name].value for name in names]
        low = [max(0.0, shares[name].value - shares[name].interval[0]) for name in names]
        high = [max(0.0, shares[name].interval[1] - shares[name].value) for name in names]
        left.barh(
            [at + height * (number - (len(columns) - 1) / 2) for at in range(len(names))], values, height=0.9 * height,
            color=COLOURS[number % len(COLOURS)], label=f"{label} (n = {shares[names[0]].n})",
            xerr=(low, high), error_kw={"lw": 1, "ecolor": GREY, "capsize": 2},
        )  # fmt: skip
    left.set_yticks(range(len(names)), names)
    left.invert_yaxis()
    left.set_xlim(0, 1.02)
    left.set_xlabel("share of right answers, images moved (95 % intervals)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    bars = right.barh(range(len(names)), [ttft_s[name] * 1000 for name in names], height=0.6, color=GREY)
    right.bar_label(bars, fmt="%.0f ms", padding=3)
    right.set_xlabel("milliseconds to the first token (median, one album)")
    right.margins(x=0.18)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
