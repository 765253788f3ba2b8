"""Does one orbit patch serve every order?

A changed scene is asked about with K pictures in front of it, in some order. Its patch for that very order (exact) is
compared with one for another order (transfer) and with the mean over all other orders (orbit: the tested one is held
out); all orders of three and four pictures are formed, 24 drawn ones of six. The pictures in front have their exact
patches in every arm, so that only the last one differs. η = 1 - KL(arm) / KL(last picture unpatched).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from looseleaf.bench.cases import (
    LITTLE,
    Arm,
    Asking,
    Item,
    Outcome,
    Try,
    album_about,
    bounds_of,
    by_cell,
    closed,
    flips,
    make_cases,
    mean_kl,
    restored,
    rows_alone,
    try_all,
)  # fmt: skip
from looseleaf.bench.models import ask_each
from looseleaf.bench.report import BenchOptions, Report
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import Patch
from looseleaf.link.policies import Reprefill
from looseleaf.link.reference import Way
from looseleaf.patch.form import form_patch
from looseleaf.patch.orbit import merge
from looseleaf.prompt.segments import Segment
from looseleaf.system import Looseleaf
from looseleaf.workloads.bounds import Bounds
from looseleaf.workloads.questions import held_out

BEFORE = (3, 4, 6)
"""Pictures in front of the one that is patched."""
MOST_ORDERS = 24
TESTED = 3
"""Orders of each item that are held out and asked about."""
SHARE = 0.25
COUNT, QUICK_COUNT = 100, 1


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """A question whose last picture is to be patched: pictures in front, in one order, and that one."""

    before: list[Segment]
    last: Segment
    item: Item

    def ordered(self, order: Sequence[int]) -> Item:
        """The item with the pictures in front in another order."""
        return self.item.behind([*(self.before[at] for at in order), self.last])


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model and number of pictures."""
    report = Report(bench="reorder", options=options)
    count = options.count or (QUICK_COUNT if options.quick else COUNT)
    asked = partial(ask, befores=BEFORE[:1] if options.quick else BEFORE)
    for name, outcomes in ask_each(options, count, asked, tell):
        report.rows += [{"model": name, "before": at, **score(arms)} for at, arms in by_cell(outcomes).items()]
        report.summary[name] = {
            f"K={row['before']}": {key: row[key] for key in ("eta_exact", "eta_orbit", "eta_transfer")}
            for row in report.rows
            if row["model"] == name
        }
    return report


def ask(ll: Looseleaf, asking: Asking, *, befores: Sequence[int]) -> list[Outcome]:
    """One model, by number of pictures in front."""
    found = []
    for before in befores:
        for number in range(asking.part, asking.count, asking.of):
            asking.tell(f"{before} pictures in front, question {number + 1} of {asking.count}")
            one = draw(bounds_of(ll), before, asking.seed, number)
            found += [Outcome(cell=before, arms=arms) for arms in try_orders(ll, one, before, asking.seed + number)]
    return found


def score(arms: Mapping[str, Sequence[Arm]]) -> dict[str, Any]:
    """What each patch of the last picture comes to."""
    blind = mean_kl(arms["blind"])
    patched = {arm: each for arm, each in arms.items() if arm != "blind"}
    worst = max(
        (one.kl / other.kl for one, other in zip(arms["orbit"], arms["blind"], strict=True) if other.kl > LITTLE),
        default=math.nan,
    )
    return {
        "orders": len(arms["blind"]),
        "kl_blind": blind,
        **{f"eta_{arm}": closed(mean_kl(each), blind) for arm, each in patched.items()},
        "eta_orbit_worst": 1 - worst,
        "flips": flips(arms["blind"]),
        **{f"restored_{arm}": restored(each, arms["blind"]) for arm, each in patched.items()},
        **{f"right_{arm}": sum(one.right for one in each) / len(each) for arm, each in arms.items()},
    }


def draw(bounds: Bounds, before: int, seed: int, number: int) -> Ordered:
    """A question about what changed in a scene, with its earlier version and other pictures in front."""
    size = bounds.sizes[number % len(bounds.sizes)]
    chunks, question, _ = album_about("change", 2, size, (before + 1,), "reorder", seed, before, number)
    last = chunks.pop(max(question.needs))
    item = Item(chunks=[*chunks, last], prompt=[*chunks, last, question.text], question=question)
    return Ordered(before=chunks, last=last, item=item)


def try_orders(ll: Looseleaf, one: Ordered, before: int, seed: int) -> list[dict[str, Arm]]:
    """Some orders, each held out from the orbit of the others."""
    orders = list(itertools.permutations(range(before)))
    chance = held_out().chance("orders", seed)
    orders = chance.sample(orders, min(len(orders), MOST_ORDERS))
    made = dict(zip(orders, last_patches(ll, [one.ordered(order) for order in orders]), strict=True))
    drawn = chance.sample(orders, min(len(orders), TESTED))
    cases = make_cases(ll, [one.ordered(order) for order in drawn])
    tries = []
    for tested, case in zip(drawn, cases, strict=True):
        others = [order for order in orders if order != tested]
        *front, last = sorted(case.conditioned)
        exact = {start: form_patch(case.conditioned[start], case.alone[start], share=1) for start in front}
        last_one = {
            "exact": made[tested],
            "orbit": orbit([made[order] for order in others]),
            "transfer": made[chance.choice(others)],
        }
        arms = {arm: Try(patches=exact | {last: patch}) for arm, patch in last_one.items()}
        tries.append({"blind": Try(patches=exact), **arms})
    return try_all(ll, cases, tries)


def last_patches(ll: Looseleaf, asked: Sequence[Item]) -> list[Patch]:
    """The patch of each item's last chunk, by one prefill of its prompt."""
    ll.warm([chunk for item in asked for chunk in item.chunks])
    prompts = [ll.builder.build(item.prompt) for item in asked]
    caught = [KVRows(ll.adapter.layout, len(prompt), ll.adapter.device) for prompt in prompts]
    ll.reference.along([
        Way(prompt=prompt, policy=Reprefill(), rows=rows) for prompt, rows in zip(prompts, caught, strict=True)
    ])  # fmt: skip
    return [
        form_patch(
            rows.part(prompt.chunks[-1].start, prompt.chunks[-1].stop),
            rows_alone(ll, prompt.chunks[-1]),
            share=SHARE,
        )
        for prompt, rows in zip(prompts, caught, strict=True)
    ]


def orbit(patches: Sequence[Patch]) -> Patch:
    """Their running mean, as a harvest would keep it: one after the other, never more than one patch."""
    mean = patches[0]
    for number, one in enumerate(patches[1:], 1):
        mean = merge(mean, number, one, 1)
    return mean


def plot(report: Report, path: Path) -> None:
    """η by number of pictures in front, a panel a model, a bar an arm."""
    models = list(report.summary)
    figure = Figure(figsize=(5 * max(1, len(models)), 3.8), layout="constrained")
    for axes, model in zip(figure.subplots(1, max(1, len(models)), squeeze=False)[0], models, strict=False):
        rows = [row for row in report.rows if row["model"] == model]
        for number, arm in enumerate(("exact", "orbit", "transfer")):
            places = [at + 0.26 * number for at in range(len(rows))]
            axes.bar(places, [row[f"eta_{arm}"] or 0 for row in rows], 0.24, label=arm)
        axes.set_xticks([at + 0.26 for at in range(len(rows))], [f"{row['before']} in front" for row in rows])
        axes.set(ylabel="η", title=model)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
