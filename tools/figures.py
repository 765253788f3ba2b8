"""Draws the Kamera paper's figures 3 and 5 to 12 from what our benches found (bench/results) into docs/kamera.

`python tools/figures.py [RESULTS [OUT]]`. Nothing is computed here; a figure whose benches left no result is passed
over and named. Results of one bench may lie in several files, one for some of the models each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from looseleaf.bench.cases import CONTROL
from looseleaf.bench.deficit import SHOWN_RANKS
from looseleaf.bench.reuse import pool

ROOT = Path(__file__).parent.parent
TOKENS = {"first half": "first half of the tokens", "first quarter": "first quarter", "deviation": "by deviation",
          "layer-adaptive": "layer by layer", "query-aware": "by attention"}  # fmt: skip
PATCHES = {"patch 25%": "patch, 25 % of bytes", "patch 25%, deep half": "its deep half", "patch 6%": "patch, 6 %"}
KINDS = {"legend": "images", "change": "images", "documents": "images", "clip": "video", "stream": "video",
         "documents as text": "text"}  # fmt: skip
Row = Mapping[str, Any]


class Results:
    """Rows and details of the benches, by name."""

    def __init__(self, folder: Path) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.json")):
            run = json.loads(path.read_text(encoding="utf-8"))
            if run["quick"]:
                continue
            if run["bench"] == "reuse" and "deficit" not in run.get("details", {}):
                raise SystemExit(f"{path}: run bench reuse with --analyse, which the figures need")
            asked = {row["model"] for row in run["rows"] if "model" in row}
            for other in self.runs.setdefault(run["bench"], []):
                twice = asked & {row.get("model") for row in other["rows"]}
                if twice:
                    raise SystemExit(f"{path}: {', '.join(sorted(twice))} has another result of bench {run['bench']}")
            self.runs[run["bench"]].append(run)

    def rows(self, bench: str, **where: Any) -> list[Row]:
        """Of every run of a bench."""
        rows = [row for run in self.runs[bench] for row in run["rows"]]
        return [row for row in rows if all(row[key] == value for key, value in where.items())]

    def details(self, bench: str, name: str) -> dict[str, Any]:
        """Of every run of a bench, by model."""
        return {model: one for run in self.runs[bench] for model, one in run["details"][name].items()}

    def shapes(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By model and task: what the deficit looks like; tasks with pictures only."""
        return {
            model: {task: shape for task, shape in tasks.items() if task != CONTROL}
            for model, tasks in self.details("reuse", "deficit").items()
        }

    def models(self, bench: str) -> list[str]:
        """Those a bench asked."""
        return list(dict.fromkeys(row["model"] for row in self.rows(bench)))


def mean(shapes: Mapping[str, Mapping[str, Any]], key: str) -> Any:
    """Of a number or curve over the tasks that have it."""
    return np.mean([shape[key] for shape in shapes.values() if key in shape], axis=0)


def multi_hop(results: Results) -> tuple[list[str], Callable[[str, str], list[float]]]:
    """Models of bench reuse, and a number of an arm for each over its multi-hop questions about pictures."""
    models = results.models("reuse")
    rows = [row for row in results.rows("reuse", hops=2) if row["task"] != CONTROL]

    def over(arm: str, key: str) -> list[float]:
        return [pool([row for row in rows if (row["model"], row["policy"]) == (model, arm)])[key] for model in models]

    return models, over


def panels(across: int, down: int = 1, *, height: float = 3.6) -> tuple[Figure, Any]:
    """An empty figure and its axes [down][across]."""
    figure = Figure(figsize=(5 * across, height * down), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat:
        axes.spines[["top", "right"]].set_visible(False)
    return figure, grid


def bars(axes: Axes, groups: Sequence[str], series: Mapping[str, Sequence[float]]) -> None:
    """A bar for every series in every group."""
    wide = 0.8 / len(series)
    for number, (label, heights) in enumerate(series.items()):
        axes.bar([at + wide * number for at in range(len(groups))], heights, wide * 0.95, label=label)
    axes.set_xticks([at + 0.4 - wide / 2 for at in range(len(groups))], groups, fontsize=8)


def below(axes: Axes) -> None:
    """A legend under the axes, where it hides nothing."""
    axes.legend(frameon=False, fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3)


def figure_3(results: Results) -> Figure:
    """Structure of the deficit: directions by layer, depth, and how many keys in front it comes from."""
    every = results.shapes()
    figure, grid = panels(3, len(every))
    for line, (model, shapes) in zip(grid, every.items(), strict=True):
        by_layer = mean(shapes, "content_carried_by_layer")
        for layer, curve in enumerate(by_layer[1:], 1):
            shade = f"{0.8 - 0.7 * layer / len(by_layer):.2f}"
            line[0].plot(SHOWN_RANKS, curve, color=shade, marker=".", label=f"layer {layer}")
        line[0].set(xscale="log", xlabel="rank", ylim=(0, 1.02), title=f"{model}: energy by rank")
        line[0].set_xticks(SHOWN_RANKS, [str(rank) for rank in SHOWN_RANKS])
        line[1].plot(mean(shapes, "keys_by_layer"), "o-", label="keys, in context")
        line[1].plot(mean(shapes, "values_by_layer"), "s--", label="values, in context")
        line[1].plot(mean(shapes, "position_by_layer"), "k:", label="keys, further from the preamble")
        line[1].set(xlabel="layer", title="share of the KV it makes up")
        names = list(shapes)
        counts = {"in front": "links", "that get 90 % of what the chunk pays them": "links_90"}
        bars(line[2], names, {label: [shapes[one][key] for one in names] for label, key in counts.items()})
        line[2].set_title("keys of the antecedent")
        for axes in line:
            below(axes)
    return figure


def figure_5(results: Results) -> Figure:
    """The rank at which recovery saturates, model by model."""
    figure, ((axes,),) = panels(1, height=4)
    for model in results.models("rank"):
        rows = results.rows("rank", model=model, arm="patch")
        axes.plot([row["rank"] for row in rows], [row["eta"] for row in rows], "o-", label=model)
    axes.axhline(0.9, color="0.7", linestyle=":")
    axes.set(xscale="log", xlabel="rank of the patch", ylabel="η", ylim=(min(0, axes.get_ylim()[0]), 1.02))
    below(axes)
    return figure


def figure_6(results: Results) -> Figure:
    """Tokens, one layer and heads are what other caches choose by."""
    figure, ((tokens, depth, heads),) = panels(3, height=4)
    styles = {"patch": "o-", "oracle tokens": "s--", "first tokens": "^:"}
    for number, model in enumerate(results.models("rank")):
        for arm, style in styles.items():
            rows = results.rows("rank", model=model, arm=arm)
            label = f"{model}: {arm}" if not number else (model if arm == "patch" else None)
            across = [row["share"] if "tokens" in arm else row["bytes"] for row in rows]
            tokens.plot(across, [row["eta"] for row in rows], style, color=f"C{number}", label=label, markersize=4)
    tokens.set(xscale="log", xlabel="share of bytes, or of tokens", ylabel="η", title="wrong axis", ylim=(-0.2, 1.02))
    for number, (model, shapes) in enumerate(results.shapes().items()):
        curve = mean(shapes, "chosen_by_layer")
        depth.plot(np.arange(1, len(curve) + 1) / (len(curve) + 1), curve, "o-", color=f"C{number}", label=model)
        depth.axhline(mean(shapes, "chosen_by_oracle"), color=f"C{number}", linestyle=":")
        if any("energy_by_heads" in shape for shape in shapes.values()):
            share = mean(shapes, "energy_by_heads")
            heads.plot(np.arange(1, len(share) + 1) / len(share), share, "o-", color=f"C{number}", label=model)
    depth.set(xlabel="depth of the layer that chooses", ylim=(0, 1.02),
              title="wrong depth: energy in the quarter it chooses\n(dotted: the best quarter)")  # fmt: skip
    heads.plot([0, 1], [0, 1], color="0.7", linestyle=":")
    heads.set(xlabel="share of heads, best first", ylim=(0, 1.02), title="wrong grouping: energy in the best heads")
    for axes in (tokens, depth, heads):
        below(axes)
    return figure


def figure_7(results: Results) -> Figure:
    """A patch against caches that compute tokens again, on questions that need several images."""
    figure, ((closed, restored, residual),) = panels(3, height=4.2)
    models, over = multi_hop(results)
    every = {**TOKENS, **PATCHES}
    blind = over("full-reuse", "kl")
    bars(closed, models, {label: [1 - one / other for one, other in zip(over(arm, "kl"), blind, strict=True)]
                          for arm, label in every.items()})  # fmt: skip
    closed.set(title="share of the KL closed, η", ylim=(min(0, closed.get_ylim()[0]), 1.02))
    flips = over("full-reuse", "flips")
    bars(restored, models, {label: [one / max(1, flip) for one, flip in zip(over(arm, "restored"), flips, strict=True)]
                            for arm, label in every.items()})  # fmt: skip
    restored.set(title="answers blind reuse changes, restored", ylim=(0, 1.02))
    tenths = results.details("reuse", "kl_by_tenths")
    for arm, label in {"full-reuse": "blind", **every}.items():
        curve = np.mean([one[arm] for one in tenths.values()], axis=0)
        residual.plot(np.linspace(0, 1, 11), curve, label=label, color="k" if arm == "full-reuse" else None,
                      linestyle="-" if "patch" in arm else "--")  # fmt: skip
    residual.set(
        xlabel="share of questions", ylabel="KL, nats", title="KL by tenths of the questions, mean over models"
    )
    residual.set_yscale("symlog", linthresh=1e-3)
    below(closed)
    below(residual)
    return figure


def figure_8(results: Results) -> Figure:
    """Where the deficit lies: tokens down, features across, a map a layer."""
    every = results.shapes()
    maps = {model: mean(shapes, "map") for model, shapes in every.items()}
    deepest = max(len(one) for one in maps.values())
    figure = Figure(figsize=(1.7 * deepest, 2.2 * len(maps)), layout="constrained")
    grid = figure.subplots(len(maps), deepest, squeeze=False)
    for line, (model, layers) in zip(grid, maps.items(), strict=True):
        for number, axes in enumerate(line):
            if number < len(layers):
                shown = axes.imshow(layers[number], vmin=0, vmax=maps[model].max(), cmap="magma", aspect="auto")
                axes.set_title(f"layer {number}", fontsize=8)
            else:
                axes.set_visible(False)
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(f"{model}\ntokens", fontsize=8)
        line[0].set_xlabel("features", fontsize=8)
        figure.colorbar(shown, ax=list(line), shrink=0.8)
    return figure


def figure_9(results: Results) -> Figure:
    """Low rank and recovery across models, and how much each binds images at all."""
    figure, ((energy, recovery, gap),) = panels(3, height=4)
    for number, (model, shapes) in enumerate(results.shapes().items()):
        curve = mean(shapes, "content_energy_by_rank")
        energy.plot(range(1, len(curve) + 1), curve, color=f"C{number}", label=model)
        rows = results.rows("rank", model=model, arm="patch")
        recovery.plot([row["rank"] for row in rows], [row["restored"] / max(1, row["flips"]) for row in rows], "o-",
                      color=f"C{number}", label=model)  # fmt: skip
    energy.set(xlabel="rank", ylim=(0, 1.02), title="energy of the deficit (keys; MLA: latents)")
    recovery.set(xlabel="rank", ylim=(0, 1.02), title="flips a patch restores")
    models, over = multi_hop(results)
    arms = {"re-prefill": "reprefill", "blind reuse": "full-reuse", "patch, 25 %": "patch 25%"}
    bars(gap, models, {label: over(arm, "accuracy") for label, arm in arms.items()})
    gap.set(ylim=(0, 1.02), title="multi-hop accuracy")
    for axes in (energy, recovery, gap):
        below(axes)
    return figure


def figure_10(results: Results) -> Figure:
    """Images and clips lose and recover; pages of text, and questions that name what joins two pages, hardly lose."""
    figure, ((lost, right),) = panels(2, height=4)
    tasks = [task for task in KINDS if results.rows("reuse", task=task)]
    labels = [f"{task.replace(' as text', '')}\n({KINDS[task]})" for task in tasks]

    def over(arm: str, key: str) -> list[float]:
        return [pool(results.rows("reuse", hops=2, task=task, policy=arm))[key] for task in tasks]

    arms = {"blind reuse": "full-reuse", "patch, 25 %": "patch 25%"}
    bars(lost, labels, {label: over(arm, "kl") for label, arm in arms.items()})
    lost.set(title="KL against re-prefill, nats")
    bars(right, labels, {"re-prefill": over("reprefill", "accuracy"),
                         **{label: over(arm, "accuracy") for label, arm in arms.items()}})  # fmt: skip
    right.set(title="multi-hop accuracy, all models together", ylim=(0, 1.02))
    for axes in (lost, right):
        below(axes)
    return figure


def figure_11(results: Results) -> Figure:
    """What binding costs beside computing, by length of the segment; and when a patch is paid."""
    figure, ((alone, whole, paid),) = panels(3, height=4)
    rows = results.rows("segment")
    tokens = [row["tokens"] for row in rows]
    segment = {"prefill": "computed", "patched_link": "bound, patched", "copy": "floor: KV read and written once"}
    first = {"ttft_reprefill": "computed", "ttft_patched": "patched", "weights": "floor: weights read once"}
    for axes, arms in ((alone, segment), (whole, first)):
        for arm, label in arms.items():
            style = "k:" if arm in ("copy", "weights") else "o-"
            axes.plot(tokens, [row[f"{arm}_ms"] for row in rows], style, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens of the segment")
        axes.set_xticks(tokens, [str(one) for one in tokens])
    alone.set_title("a segment alone, ms")
    whole.set_title("to the first token, ms")
    reuses = np.arange(11)
    for number, row in enumerate(results.rows("amortize", unit="seconds")):
        before, colour = row["re-prefill"] + row["alone"] + row["forming"], f"C{number}"
        paid.plot(reuses, row["re-prefill"] * (1 + reuses), "--", color=colour, label=f"{row['dtype']}: re-prefill")
        paid.plot(reuses, before + row["patched"] * reuses, "o-", color=colour, label=f"{row['dtype']}: patched")
    paid.set(xlabel="reuses", title="seconds in all")
    for axes in (alone, whole, paid):
        below(axes)
    return figure


def figure_12(results: Results) -> Figure:
    """What is left after rotation and patch, over models; our forward beside the models' own; answers."""
    figure, ((left, exact, answers),) = panels(3, height=4)
    models, over = multi_hop(results)
    arms = {"blind": "full-reuse", "patch, 25 %": "patch 25%", "noise of moving": "reprefill, moved"}
    bars(left, models, {label: over(arm, "kl") for label, arm in arms.items()})
    left.set(yscale="log", ylabel="KL, nats", title="the answer's distribution")
    families = results.rows("exact")
    names = list(dict.fromkeys(row["family"] for row in families))
    worst = [max(row["logit_err"] for row in families if row["family"] == name) for name in names]
    exact.barh(names, worst)
    exact.set(xscale="log", title="re-prefill against the model's own forward", xlabel="largest error of a logit")
    exact.tick_params(axis="y", labelsize=7)
    count = over("reprefill", "n")
    agreeing = {label: [1 - changed / n for changed, n in zip(over(arm, "changed"), count, strict=True)]
                for label, arm in arms.items()}  # fmt: skip
    bars(answers, models, agreeing)
    answers.set(ylim=(0, 1.02), title="answers equal to re-prefill's, word by word")
    for axes in (left, answers):
        below(axes)
    return figure


FIGURES: dict[str, tuple[Callable[[Results], Figure], tuple[str, ...]]] = {
    "figure-3": (figure_3, ("reuse",)), "figure-5": (figure_5, ("rank",)), "figure-6": (figure_6, ("reuse", "rank")),
    "figure-7": (figure_7, ("reuse",)), "figure-8": (figure_8, ("reuse",)), "figure-9": (figure_9, ("reuse", "rank")),
    "figure-10": (figure_10, ("reuse",)), "figure-11": (figure_11, ("segment", "amortize")),
    "figure-12": (figure_12, ("reuse", "exact")),
}  # fmt: skip
"""By name: what draws it, and the benches it takes."""


def main(folder: Path = ROOT / "bench" / "results", out: Path = ROOT / "docs" / "kamera") -> None:
    """Every figure that has results."""
    results = Results(folder)
    out.mkdir(parents=True, exist_ok=True)
    for name, (draw, benches) in FIGURES.items():
        missing = [bench for bench in benches if bench not in results.runs]
        if missing:
            print(f"{name}: no result of bench {' and '.join(missing)}")
            continue
        draw(results).savefig(out / f"{name}.png", dpi=110)
        print(f"{name}: {out / name}.png")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
