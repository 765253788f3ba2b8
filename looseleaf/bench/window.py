"""What do a window's survivors and returning pages need?

Survivors: a picture in front leaves, one the question needs or one it does not. Those behind keep their rows, turned to
where they stand then (kept), get a patch that takes the gone picture out of them (removal), one on what is stored
(fresh), or nothing (blind). Compared with a prompt that never had the picture (forget) and one that has it (remember).

Recall: the last picture a question needs left and comes back behind pictures of which a share was replaced meanwhile.
Its patch from before (stale), a new one (fresh) or none (blind), all others exact. η = 1 - KL(arm) / KL(blind).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from matplotlib.figure import Figure

from looseleaf.bench.cases import (
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
    items,
    make_cases,
    mean_kl,
    possible,
    restored,
    rounds,
    try_all,
)  # fmt: skip
from looseleaf.bench.envelope import FORM, WHOLE, drifting_tasks, patches_by_content, placed
from looseleaf.bench.models import ask_each
from looseleaf.bench.report import BenchOptions, Report
from looseleaf.kv.records import Patch
from looseleaf.patch.deficit import Deficit
from looseleaf.patch.form import factor_all, patch_of, rank_within
from looseleaf.prompt.chunks import Prompt
from looseleaf.system import Looseleaf

COUNT, QUICK_COUNT = 100, 1
TURNOVER = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of the pictures in front that were replaced."""
ABOUT = 0.125
"""How far from that a question's own share may be: one with two pictures in front has no quarter of them."""
GONE = ("needed", "not needed")


def _left(gone: str) -> str:
    return f"survivors, one {gone} left"


def _back(turned: float) -> str:
    return f"recall, {turned:.0%} replaced"


CELLS = (
    *((_left(gone), against) for gone in GONE for against in ("forget", "remember")),
    *((_back(turned), "re-prefill") for turned in TURNOVER),
)
"""What is told apart, and what each is compared with, in the order of the table."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model: rows for survivors by whether the question needs what left, and for recall by turnover."""
    report = Report(bench="window", options=options)
    count = options.count or (QUICK_COUNT if options.quick else COUNT)
    for name, outcomes in ask_each(options, count, ask, tell):
        found = by_cell(outcomes)
        rows = [
            {"model": name, "what": what, "against": against, **row}
            for what, against in CELLS
            if (what, against) in found
            for row in score(found[what, against])
        ]
        report.rows += rows
        report.summary[name] = summarise(rows)
    return report


def ask(ll: Looseleaf, asking: Asking) -> list[Outcome]:
    """One model: by what left or came back, and what it is compared with."""
    found = []
    for task in drifting_tasks(bounds_of(ll)):
        for number, some in rounds(bounds_of(ll), task, 2, asking):
            plain = [item.behind(item.chunks) for item in some]
            others = items(bounds_of(ll), task, 2, len(some), asking.seed + 1000 + number)
            found += try_survivors(ll, plain, asking.seed)
            found += try_recall(ll, plain, others, asking.seed)
    return found


def try_survivors(ll: Looseleaf, some: Sequence[Item], seed: int) -> list[Outcome]:
    """Every question with a picture in front gone, by which one and against what."""
    found = []
    whole = make_cases(ll, some)
    for gone in GONE:
        left = (_without(case.item, gone, Random(f"{seed} {at}")) for at, case in enumerate(whole))
        moved, remember = possible(left, whole)
        forget = make_cases(ll, moved)
        tries = [_survivors(before, after) for before, after in zip(remember, forget, strict=True)]
        for against, cases in (("forget", forget), ("remember", remember)):
            prompts = [
                {arm: replace(one, prompt=after.prompt) for arm, one in ways.items()}
                for ways, after in zip(tries, forget, strict=True)
            ]
            cell = (_left(gone), against)
            found += [Outcome(cell=cell, arms=arms) for arms in try_all(ll, cases, prompts)]
    return found


def _without(item: Item, gone: str, chance: Random) -> Item | None:
    """An item without one picture in front of the last it needs; None where there is none such."""
    last = max(item.question.needs)
    needed = [at for at in item.question.needs if at < last]
    spare = [at for at in range(last) if at not in item.question.needs]
    choice = needed if gone == "needed" else spare
    if not choice:
        return None
    at = chance.choice(choice)
    chunks = [*item.chunks[:at], *item.chunks[at + 1 :]]
    return item.behind(chunks)


def _survivors(before: Case, after: Case) -> dict[str, Try]:
    """Ways to a prompt that lost a picture: what its others kept, and what they could have instead."""
    kept = patches_by_content(before, WHOLE)
    removal = {}
    for span, old in _same_chunks(before.prompt, after.prompt):
        alone = after.alone[span]
        was, now = before.deficits[old], after.deficits[span]
        removal[span] = patch_of(_moved(was, now), alone, share=1.0)
    return {
        "blind": Try(),
        "kept": Try(patches=placed(after, kept)),
        "removal": Try(patches=removal),
        "fresh": Try(patches=placed(after, patches_by_content(after, FORM))),
    }


def _same_chunks(before: Prompt, after: Prompt) -> list[tuple[int, int]]:
    """First slots of the chunks of a prompt, and of the same ones in the prompt it was cut from."""
    starts: dict[str, list[int]] = {}
    for span in before.chunks:
        assert span.chunk is not None
        starts.setdefault(span.chunk.content, []).append(span.start)
    found = []
    for span in after.chunks:
        assert span.chunk is not None
        found.append((span.start, starts[span.chunk.content][0]))
    return found


def _moved(was: Deficit, now: Deficit) -> Deficit:
    """What a chunk kept, with a patch of FORM's bytes that takes it to what it would be now."""
    old, new = (*was.keys, *was.values), (*now.keys, *now.values)
    steps = factor_all(
        [after - before for before, after in zip(old, new, strict=True)],
        [rank_within(FORM.share, *before.shape) for before in old],
    )
    moved = [before + step.left @ step.right.mT for before, step in zip(old, steps, strict=True)]
    return replace(now, keys=tuple(moved[: len(was.keys)]), values=tuple(moved[len(was.keys) :]))


def try_recall(ll: Looseleaf, some: Sequence[Item], others: Sequence[Item], seed: int) -> list[Outcome]:
    """The last picture a question needs, back behind pictures some of which are new."""
    stale = [patches_by_content(case, FORM) for case in make_cases(ll, some)]
    found = []
    for turned in TURNOVER:
        pairs = enumerate(zip(some, others, strict=True))
        changed = (_turned(item, other, turned, Random(f"{seed} {at}")) for at, (item, other) in pairs)
        moved, known = possible(changed, stale)
        cases = make_cases(ll, moved)
        tries = []
        for case, old in zip(cases, known, strict=True):
            back = case.prompt.chunks[max(case.item.question.needs)]
            assert back.chunk is not None
            rest = {at: one for at, one in placed(case, patches_by_content(case, WHOLE)).items() if at != back.start}
            fresh: dict[int, Patch] = {back.start: patches_by_content(case, FORM)[back.chunk.content]}
            tries.append({
                "blind": Try(patches=rest),
                "stale": Try(patches={**rest, back.start: old[back.chunk.content]}),
                "fresh": Try(patches={**rest, **fresh}),
            })  # fmt: skip
        cell = (_back(turned), "re-prefill")
        found += [Outcome(cell=cell, arms=arms) for arms in try_all(ll, cases, tries)]
    return found


def _turned(item: Item, other: Item, share: float, chance: Random) -> Item | None:
    """An item of whose pictures in front of the last it needs about a share is another's; None where that cannot be."""
    last = max(item.question.needs)
    chunks = list(item.chunks)
    lent = [chunk for chunk in other.chunks if chunk not in chunks]
    count = round(share * last)
    if count > len(lent) or abs(count - share * last) > ABOUT * last:
        return None
    for at in chance.sample(range(last), count):
        chunks[at] = lent.pop(0)
    return item.behind(chunks)


def score(arms: Mapping[str, Sequence[Arm]]) -> list[dict[str, Any]]:
    """A row for every arm."""
    blind = arms["blind"]
    return [
        {
            "arm": arm, "n": len(each), "kl": mean_kl(each), "eta": closed(mean_kl(each), mean_kl(blind)),
            "changed": sum(one.changed for one in each), "flips": flips(blind), "restored": restored(each, blind),
            "right": sum(one.right for one in each),
        }
        for arm, each in arms.items()
    ]  # fmt: skip


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What survivors lose when they are kept as they are, what a removal patch closes of it, and recall by turnover."""
    found: dict[str, dict[str, Any]] = {}
    kept: dict[str, float] = {}
    for row in rows:
        kind, _, where = row["what"].partition(", ")
        if kind == "recall" and row["arm"] in ("fresh", "stale"):
            found.setdefault(f"recall_{row['arm']}_eta", {})[where] = row["eta"]
        elif row["arm"] == "kept":
            found.setdefault(f"survivor_{row['against']}_kl", {})[where] = row["kl"]
            kept |= {where: row["kl"]} if row["against"] == "forget" else {}
        elif row["arm"] == "removal" and row["against"] == "forget":
            found.setdefault("survivor_removal_eta", {})[where] = closed(row["kl"], kept[where])
    return found


def plot(report: Report, path: Path) -> None:
    """A row a model: KL of survivors by arm, and η of recall by turnover."""
    models = list(report.summary)
    figure = Figure(figsize=(11, 4 * max(1, len(models))), layout="constrained")
    for pair, model in zip(figure.subplots(max(1, len(models)), 2, squeeze=False), models, strict=False):
        rows = [row for row in report.rows if row["model"] == model]
        left = [row for row in rows if row["what"].startswith("survivors")]
        groups = list(dict.fromkeys((row["what"], row["against"]) for row in left))
        names = list(dict.fromkeys(row["arm"] for row in left))
        for number, arm in enumerate(names):
            picked = {(row["what"], row["against"]): row["kl"] for row in left if row["arm"] == arm}
            pair[0].bar(
                [at + 0.2 * number for at in range(len(groups))], [picked[one] for one in groups], 0.18, label=arm
            )
        labels = [f"{what.removeprefix('survivors, one ')}\nagainst {against}" for what, against in groups]
        pair[0].set_xticks([at + 0.3 for at in range(len(groups))], labels, fontsize=7)
        pair[0].set(ylabel="KL, nats", title=f"{model}: survivors")
        for arm in ("stale", "fresh"):
            told = {row["what"]: row["eta"] for row in rows if row["arm"] == arm}
            turned = [share for share in TURNOVER if _back(share) in told]
            pair[1].plot(turned, [told[_back(share)] for share in turned], "o-", label=arm)
        pair[1].axhline(0, color="0.6", linewidth=0.8)
        pair[1].set(xlabel="pictures in front replaced", ylabel="η", title=f"{model}: recall")
        for axes in pair:
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
