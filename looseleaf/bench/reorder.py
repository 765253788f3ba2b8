"""Does one orbit patch serve every order?

A changed scene is asked about with K pictures in front of it, in some order. Its patch for that very order (exact) is
compared with one for another order (transfer) and with the mean over all other orders (orbit: the tested one is held
out); all orders of three and four pictures are formed, 24 drawn ones of six. The pictures in front have their exact
patches in every arm, so that only the last one differs. η = 1 - KL(arm) / KL(last picture unpatched).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from looseleaf.bench.models import each_model
from looseleaf.bench.patching import Arm, Patches, eta, in_context, make_case, part, try_patches
from looseleaf.bench.report import BenchOptions, Report
from looseleaf.bench.reuse import Item, bounds_of
from looseleaf.kv.records import ChunkKV, Patch
from looseleaf.patch.form import form_patch
from looseleaf.patch.orbit import merge
from looseleaf.prompt.segments import Segment
from looseleaf.system import Looseleaf
from looseleaf.workloads.albums import as_segment, headline_question, task_album
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
        chunks = [*(self.before[at] for at in order), self.last]
        return replace(self.item, chunks=chunks, prompt=[*chunks, self.item.question.text])


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model and number of pictures."""
    report = Report(bench="reorder", options=options)
    count = options.count or (QUICK_COUNT if options.quick else COUNT)
    for name, ll in each_model(options, tell):
        for before in BEFORE[:1] if options.quick else BEFORE:
            row = measure(ll, name, before, count, options.seed, tell)
            report.rows.append({"model": name, "before": before, **row})
        report.summary[name] = {
            f"K={row['before']}": {key: row[key] for key in ("eta_exact", "eta_orbit", "eta_transfer")}
            for row in report.rows
            if row["model"] == name
        }
    return report


def measure(
    ll: Looseleaf, name: str, before: int, count: int, seed: int, tell: Callable[[str], None]
) -> dict[str, Any]:
    """One number of pictures in front."""
    found: dict[str, list[Arm]] = {arm: [] for arm in ("blind", "exact", "orbit", "transfer")}
    for number, one in enumerate(draw(bounds_of(ll), before, count, seed)):
        if number % math.ceil(count / 10) == 0:
            tell(f"{name}: {before} pictures in front, question {number + 1} of {count}")
        for tested in try_orders(ll, one, before, seed + number):
            for arm, outcome in tested.items():
                found[arm].append(outcome)
    closed = {f"eta_{arm}": eta(each, found["blind"]) for arm, each in found.items() if arm != "blind"}
    worst = max(
        (one.kl / other.kl for one, other in zip(found["orbit"], found["blind"], strict=True) if other.kl > 1e-3),
        default=math.nan,
    )
    flips = [at for at, one in enumerate(found["blind"]) if one.changed]
    restored = {
        f"restored_{arm}": sum(not each[at].changed for at in flips) for arm, each in found.items() if arm != "blind"
    }
    accuracy = {f"right_{arm}": sum(one.right for one in each) / len(each) for arm, each in found.items()}
    return {
        "n": len(found["blind"]), "kl_blind": sum(one.kl for one in found["blind"]) / len(found["blind"]), **closed,
        "eta_orbit_worst": 1 - worst, "flips": len(flips), **restored, **accuracy,
    }  # fmt: skip


def draw(bounds: Bounds, before: int, count: int, seed: int) -> list[Ordered]:
    """Questions about what changed in a scene, with its earlier version and other pictures in front."""
    split, found = held_out(), []
    for number in itertools.count():
        chance = split.chance("reorder", seed, before, number)
        album = task_album("change", chance, split, bounds.sizes[number % len(bounds.sizes)], before + 1)
        question = headline_question("change", 2, album, chance, split)
        if question is None:
            continue
        chunks: list[Segment] = [as_segment(entry) for entry in album.entries]
        last = chunks.pop(max(question.needs))
        item = Item(chunks=[*chunks, last], prompt=[*chunks, last, question.text], question=question)
        found.append(Ordered(before=chunks, last=last, item=item))
        if len(found) == count:
            break
    return found


def try_orders(ll: Looseleaf, one: Ordered, before: int, seed: int) -> list[dict[str, Arm]]:
    """Some orders, each held out from the orbit of the others."""
    orders = list(itertools.permutations(range(before)))
    chance = held_out().chance("orders", seed)
    orders = chance.sample(orders, min(len(orders), MOST_ORDERS))
    patches = {order: last_patch(ll, one.ordered(order)) for order in orders}
    outcomes = []
    for tested in chance.sample(orders, min(len(orders), TESTED)):
        others = [order for order in orders if order != tested]
        case = make_case(ll, one.ordered(tested))
        *front, last = sorted(case.conditioned)
        exact = {start: form_patch(case.conditioned[start], case.alone[start], share=1) for start in front}
        arms: dict[str, Patches] = {
            "blind": exact,
            "exact": exact | {last: patches[tested]},
            "orbit": exact | {last: orbit([patches[order] for order in others])},
            "transfer": exact | {last: patches[chance.choice(others)]},
        }
        outcomes.append({arm: try_patches(ll, case, each) for arm, each in arms.items()})
    return outcomes


def last_patch(ll: Looseleaf, item: Item) -> Patch:
    """The patch of an item's last chunk, by one prefill of its prompt."""
    ll.warm(item.chunks)
    prompt = ll.builder.build(item.prompt)
    span = prompt.chunks[-1]
    assert span.chunk is not None
    alone = ll.store.get(ll.linker.keys.kv(span.chunk))
    assert isinstance(alone, ChunkKV)
    return form_patch(part(in_context(ll, prompt), span), alone.rows, share=SHARE)


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
