"""What does each policy cost in accuracy?

Held-out questions of every task the embedded models were trained on, single-hop and multi-hop: the pictures of an album
are computed once, alone, and stored; then the same question is answered under every policy, and with patches of some
shares of the pages' bytes. Against re-prefill: accuracy, KL of the answer's distribution, η = 1 - KL(arm) / KL(blind),
answers changed, and of those that blind reuse changes (flips) the share a policy restores. The noise floor is
re-prefill against re-prefill of the same prompt moved as a whole and computed in pieces. Pages given as words are the
control: no picture is involved.

Not asked here: an image that later ones were read behind and that is no longer in the prompt. Stored chunks carry no
other image, so the question needs windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from looseleaf.bench import deficit
from looseleaf.bench.cases import (
    CONTROL,
    Arm,
    Asking,
    Case,
    Item,
    Outcome,
    Try,
    bounds_of,
    by_cell,
    closed,
    flips,
    make_cases,
    mean_kl,
    restored,
    rounds,
    tasks,
    try_all,
)  # fmt: skip
from looseleaf.bench.models import DTYPE, ask_each
from looseleaf.bench.report import BenchOptions, Report, Share
from looseleaf.kv.layout import KVLayout
from looseleaf.kv.records import Patch
from looseleaf.link.policies import (
    DeepLayers,
    Deviation,
    FirstK,
    FullReuse,
    LayerAdaptive,
    LowRankKeys,
    Policy,
    QueryAware,
    Reprefill,
)  # fmt: skip
from looseleaf.model.embedded import embedded_models
from looseleaf.patch.form import cut, patch_of
from looseleaf.prompt.chunks import Prompt
from looseleaf.system import Looseleaf

COUNT, QUICK_COUNT, ANALYSED = 500, 3, 16
"""Questions of a task and number of hops (quick: of all models together); chunks of a task that are analysed."""
SHARE = 0.25
"""Of the chunks' tokens, or of their keys' bytes, that policies with a ratio get."""
PATCH_SHARES = (0.06, 0.25)
"""Of a page's bytes that its patch takes."""
DEEP_PATCH = "patch 25%, deep half"
MOVED, PIECE = 64, 48
"""The noise floor: positions a prompt is moved by, and rows it is computed in at a time."""
CEILING, BLIND, NOISE = "reprefill", "full-reuse", "reprefill, moved"
TOKEN_ARMS = ("first quarter", "deviation", "layer-adaptive", "query-aware")
"""Arms that compute a quarter of the chunks' tokens in context."""
FEW_TOKEN_ARMS = ("first 6%", "deviation 6%")
"""Arms that compute as many tokens as the smaller patch has of the bytes."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model and task; with `analyse`, the shape of the deficit too."""
    report = Report(bench="reuse", options=options)
    models = len(options.models or embedded_models())
    count = options.count or (max(1, QUICK_COUNT // max(1, models)) if options.quick else COUNT)
    for name, outcomes in ask_each(options, count, ask_all, tell):
        rows = [
            {"model": name, "task": task, "hops": hops, "policy": arm, **one}
            for (task, hops), arms in by_cell(outcomes).items()
            for arm, one in score(arms).items()
        ]
        report.rows += rows
        report.details.setdefault("kl_by_tenths", {})[name] = tenths(outcomes)
        report.summary[name] = {"dtype": options.dtype or DTYPE, **summarise(rows)}
    if options.analyse is not None:
        shapes = {}
        for name, found in ask_each(options, min(count, ANALYSED), analyse, tell):
            by_task = {task: [shape for one, shape in found if one == task] for task, _ in found}
            shapes[name] = {task: deficit.average(each) for task, each in by_task.items()}
            report.summary[name] |= digest(shapes[name])
        report.details["deficit"] = shapes
        deficit.plot(shapes, options.analyse)
    return report


def ask_all(ll: Looseleaf, asking: Asking) -> list[Outcome]:
    """One model about every task, by task and number of hops."""
    return [
        Outcome(cell=(task, hops), arms=arms)
        for task in tasks(bounds_of(ll))
        for hops in (1, 2)
        for _, some in rounds(bounds_of(ll), task, hops, asking)
        for arms in ask(ll, some)
    ]


def policies(prompt: Prompt, layout: KVLayout) -> dict[str, Policy]:
    """The arms, fitted to a prompt's chunks and a model's layers."""
    layers, plane = len(layout.layers), layout.layers[0].keys
    tokens = sum(len(span) for span in prompt.chunks) / len(prompt.chunks)
    width = plane.heads * plane.dim
    return {
        CEILING: Reprefill(),
        BLIND: FullReuse(),
        "first 6%": FirstK(k=round(PATCH_SHARES[0] * tokens)),
        "first quarter": FirstK(k=round(SHARE * tokens)),
        "first half": FirstK(k=round(tokens / 2)),
        "deviation 6%": Deviation(ratio=PATCH_SHARES[0]),
        "deviation": Deviation(ratio=SHARE),
        "layer-adaptive": LayerAdaptive(ratio=SHARE),
        "query-aware": QueryAware(ratio=SHARE),
        "deep-layers": DeepLayers(from_layer=layers // 2),
        "low-rank-keys": LowRankKeys(rank=max(1, round(SHARE * tokens * width / (tokens + width)))),
    }


def ask(ll: Looseleaf, asked: Sequence[Item]) -> list[dict[str, Arm]]:
    """Questions under every policy and with patches, their chunks stored before."""
    middle = len(ll.adapter.layout.layers) // 2
    cases = make_cases(ll, asked, layers=(middle,))
    computed = ll.linker.counters.chunks_computed
    tries = []
    for case in cases:
        ways = {arm: Try(policy=policy) for arm, policy in policies(case.prompt, ll.adapter.layout).items()}
        made = patches_of(case)
        for share, patches in made.items():
            ways[f"patch {share:.0%}"] = Try(patches=patches)
        deep = {at: cut(one, share=1, from_layer=middle) for at, one in made[SHARE].items()}
        ways[DEEP_PATCH] = Try(patches=deep)
        moved = ll.builder.build(case.item.prompt, start_pos=MOVED)
        ways[NOISE] = Try(policy=Reprefill(), prompt=moved, max_rows=PIECE)
        tries.append(ways)
    found = try_all(ll, cases, tries)
    assert all(arms[BLIND].reused > 0 for arms in found), "nothing was reused: there is nothing to measure"
    assert ll.linker.counters.chunks_computed == computed, "a stored chunk was computed again"
    return found


def patches_of(case: Case) -> dict[float, dict[int, Patch]]:
    """Patches of every chunk by share, as harvesting this very prompt would leave them.

    But for a rounding in bf16: a harvest turns rotated keys back, here they are caught before they turn.
    """
    largest = {at: patch_of(one, case.alone[at], share=PATCH_SHARES[-1]) for at, one in case.deficits.items()}
    return {share: {at: cut(one, share=share) for at, one in largest.items()} for share in PATCH_SHARES}


def score(arms: Mapping[str, Sequence[Arm]]) -> dict[str, dict[str, Any]]:
    """Figures of every arm over the same questions."""
    blind = arms[BLIND]
    kl = {arm: mean_kl(each) for arm, each in arms.items()}
    figures = {}
    for arm, each in arms.items():
        share = Share(right=sum(one.right for one in each), n=len(each))
        low, high = share.interval
        figures[arm] = {
            "n": share.n,
            "accuracy": share.value,
            "low": low,
            "high": high,
            "kl": kl[arm],
            "eta": closed(kl[arm], kl[BLIND], kl.get(NOISE, 0.0)),
            "changed": sum(one.changed for one in each),
            "flips": flips(blind),
            "restored": restored(each, blind),
            "reused": sum(one.reused for one in each) / len(each),
        }
    return figures


def tenths(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """KL of every arm over the multi-hop questions about pictures: the least, by tenths, the most."""
    asked = [one.arms for one in outcomes if one.cell[1] == 2 and one.cell[0] != CONTROL]
    nats = {arm: [arms[arm].kl for arms in asked] for arm in (asked[0] if asked else ())}
    return {arm: np.quantile(each, np.linspace(0, 1, 11)).round(6).tolist() for arm, each in nats.items()}


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One model's figures over its tasks with pictures, and blind reuse of pages given as words."""
    single, multi, words = _over(rows, 1, False), _over(rows, 2, False), _over(rows, 2, True)
    best, best_few = (min(arms, key=lambda arm: multi[arm]["kl"]) for arms in (TOKEN_ARMS, FEW_TOKEN_ARMS))
    summary: dict[str, Any] = {}
    for name, arm in (("reprefill", CEILING), ("blind", BLIND), ("first_quarter", "first quarter"),
                      ("first_half", "first half"), ("tokens6", best_few), ("tokens25", best),
                      ("deep_layers", "deep-layers"),
                      ("patch6", "patch 6%"), ("patch25", "patch 25%"), ("patch_deep", DEEP_PATCH)):  # fmt: skip
        summary[f"{name}_multi"] = multi[arm]["accuracy"]
        summary[f"{name}_single"] = single[arm]["accuracy"]
        summary[f"{name}_eta"] = closed(multi[arm]["kl"], multi[BLIND]["kl"], multi[NOISE]["kl"])
        summary[f"{name}_flip_recover"] = multi[arm]["restored"] / multi[arm]["flips"] if multi[arm]["flips"] else None
    return summary | {
        "tokens25_policy": best,
        "text_reprefill_multi": words[CEILING]["accuracy"],
        "text_blind_multi": words[BLIND]["accuracy"],
        "flips": multi[BLIND]["flips"],
        "blind_kl": multi[BLIND]["kl"],
        "noise_kl": multi[NOISE]["kl"],
        "noise_changed": multi[NOISE]["changed"],
    }


def _over(rows: Sequence[Mapping[str, Any]], hops: int, control: bool) -> dict[str, dict[str, float]]:
    """Every arm over the tasks with pictures, or over the control."""
    asked = [row for row in rows if row["hops"] == hops and (row["task"] == CONTROL) == control]
    return {arm: pool([row for row in asked if row["policy"] == arm]) for arm in _arms(asked)}


def _arms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def pool(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One arm over several tasks, each question counting once."""
    count = sum(row["n"] for row in rows)
    means = {key: sum(row[key] * row["n"] for row in rows) / count for key in ("accuracy", "kl")}
    return means | {key: sum(row[key] for row in rows) for key in ("changed", "flips", "restored", "n")}


def analyse(ll: Looseleaf, asking: Asking) -> list[tuple[str, dict[str, Any]]]:
    """By task: the deficit of the last chunk each multi-hop question needs."""
    found = []
    for task in tasks(bounds_of(ll)):
        for _, some in rounds(bounds_of(ll), task, 2, asking):
            for item in some:
                ll.warm(item.chunks)
                prompt, last = ll.builder.build(item.prompt), max(item.question.needs)
                found.append((task, deficit.measure(ll, prompt, prompt.chunks[last], item.chunks[last])))
    return found


def digest(shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What the shapes come to, over the tasks with pictures."""
    asked = [shape for task, shape in shapes.items() if task != CONTROL]
    keys = ("tokens_50", "tokens_90", "keys_rank_90", "values_rank_90", "links_90", "attention_first_quarter",
            "distance_first_quarter")  # fmt: skip
    found = {key: [one[key] for one in asked if key in one] for key in keys}
    return {f"deficit_{key}": sum(each) / len(each) for key, each in found.items() if each}


def plot(report: Report, path: Path) -> None:
    """Accuracy by task and policy with its interval, a line of panels a model: single-hop and multi-hop."""
    models = list(report.summary)
    figure = Figure(figsize=(15, 4 * max(1, len(models))), layout="constrained")
    grid = figure.subplots(max(1, len(models)), 2, squeeze=False)
    for line, model in zip(grid, models, strict=True):
        for axes, hops in zip(line, (1, 2), strict=True):
            rows = [row for row in report.rows if row["model"] == model and row["hops"] == hops]
            arms, asked = _arms(rows), list(dict.fromkeys(row["task"] for row in rows))
            for number, arm in enumerate(arms):
                own = [row for row in rows if row["policy"] == arm]
                places = [asked.index(row["task"]) + 0.8 * number / len(arms) for row in own]
                heights = [row["accuracy"] for row in own]
                errors = [[row["accuracy"] - row["low"] for row in own], [row["high"] - row["accuracy"] for row in own]]
                axes.bar(places, heights, 0.8 / len(arms), yerr=errors, label=arm, error_kw={"lw": 0.6})
            axes.set_xticks([at + 0.36 for at in range(len(asked))], asked)
            axes.set_ylim(0, 1.02)
            axes.set_title(f"{model}, {'single' if hops == 1 else 'multi'}-hop: share answered right")
            axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=120)
