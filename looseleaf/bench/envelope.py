"""How far may an antecedent drift before a patch harms?

Patches are made in a prompt of pictures and put on in another that has the same ones: with words between them, many
words in front, two pictures in front exchanged, one more in front, one fewer, one of them twice, or one replaced by
another. Each is compared with that other prompt's own re-prefill, beside patches made there (exact). Below zero a patch
is worse than none: whoever finds such a one must not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from matplotlib.figure import Figure

from looseleaf.bench.cases import (
    CONTROL,
    GAPS,
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
    tasks,
    try_all,
)  # fmt: skip
from looseleaf.bench.models import ask_each
from looseleaf.bench.report import BenchOptions, Report
from looseleaf.kv.records import Patch
from looseleaf.link.policies import PatchForm
from looseleaf.patch.form import patch_of
from looseleaf.prompt.segments import Segment
from looseleaf.system import Looseleaf
from looseleaf.workloads.bounds import Bounds

FORM, WHOLE = PatchForm(share=0.25, from_layer=0), PatchForm(share=1.0, from_layer=0)
COUNT, QUICK_COUNT = 100, 1
LONG = "Here is a note from the office about the next week that has nothing to do with it, please read on. " * 3
DRIFTS = ("other words", "many words", "exchanged", "one fewer", "one twice", "one more", "replaced")


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model: a row for every drift over all tasks with pictures."""
    report = Report(bench="envelope", options=options)
    count = options.count or (QUICK_COUNT if options.quick else COUNT)
    for name, outcomes in ask_each(options, count, ask, tell):
        rows = [{"model": name, "drift": drift, **score(arms)} for drift, arms in by_cell(outcomes).items()]
        report.rows += rows
        report.summary[name] = {
            "eta": {row["drift"]: row["eta"] for row in rows},
            "update_eta": {row["drift"]: row["eta_exact"] for row in rows},
        }
    return report


def ask(ll: Looseleaf, asking: Asking) -> list[Outcome]:
    """One model, by drift."""
    return ask_drifted(ll, bounds_of(ll), drifting_tasks(bounds_of(ll)), asking, form=FORM)


def drifting_tasks(bounds: Bounds) -> list[str]:
    """Tasks with pictures, but for streams: their frames are too many to exchange one by one."""
    return [task for task in tasks(bounds) if task not in (CONTROL, "stream")]


def ask_drifted(
    ll: Looseleaf, bounds: Bounds, asked: Sequence[str], asking: Asking, *, form: PatchForm
) -> list[Outcome]:
    """Some tasks' questions under every drift."""
    found = []
    for task in asked:
        for number, some in rounds(bounds, task, 2, asking):
            others = items(bounds, task, 2, len(some), asking.seed + 1000 + number)
            found += try_drifts(ll, some, others, asking.seed, form=form)
    return found


def try_drifts(
    ll: Looseleaf, some: Sequence[Item], others: Sequence[Item], seed: int, *, form: PatchForm
) -> list[Outcome]:
    """Some questions under every drift: blind, with the patches of the prompt they drifted from, with their own.

    `whole`: with all that context had added there, as rows that were kept have it.
    """
    plain = [item.behind(item.chunks) for item in some]
    made = [(patches_by_content(case, form), patches_by_content(case, WHOLE)) for case in make_cases(ll, plain)]
    found = []
    for drift in DRIFTS:
        pairs = enumerate(zip(plain, others, strict=True))
        changed = (drifted(drift, item, other, Random(f"{seed} {at} {drift}")) for at, (item, other) in pairs)
        moved, known = possible(changed, made)
        cases = make_cases(ll, moved)
        tries = [
            {
                "blind": Try(),
                "drifted": Try(patches=placed(case, patches)),
                "exact": Try(patches=placed(case, patches_by_content(case, form))),
                "whole": Try(patches=placed(case, whole)),
            }
            for case, (patches, whole) in zip(cases, known, strict=True)
        ]
        found += [Outcome(cell=drift, arms=arms) for arms in try_all(ll, cases, tries)]
    return found


def patches_by_content(case: Case, form: PatchForm) -> dict[str, Patch]:
    """Every chunk's patch in this prompt, by what the chunk is."""
    found = {}
    for span in case.prompt.chunks:
        assert span.chunk is not None
        deficit = case.deficits[span.start]
        found[span.chunk.content] = patch_of(
            deficit, case.alone[span.start], share=form.share, from_layer=form.from_layer
        )
    return found


def placed(case: Case, patches: Mapping[str, Patch]) -> dict[int, Patch]:
    """Patches where their chunks stand in a prompt; chunks without one stay as they are stored."""
    return {
        span.start: patches[span.chunk.content]
        for span in case.prompt.chunks
        if span.chunk is not None and span.chunk.content in patches
    }


def drifted(drift: str, item: Item, other: Item, chance: Random) -> Item | None:
    """An item whose prompt is its pictures and the question, in one that differs in one way; None where it cannot.

    `other` lends a picture. The last picture the question needs stays where it is, behind all that changes.
    """
    last = max(item.question.needs)
    front, rest = list(item.chunks[:last]), list(item.chunks[last:])
    first_words = ""
    match drift:
        case "other words":
            first_words = "Please look well at all of these: "
        case "many words":
            first_words = LONG
        case "exchanged" if len(front) > 1:
            one, two = chance.sample(range(len(front)), 2)
            front[one], front[two] = front[two], front[one]
        case "one twice" if front:
            front.insert(0, chance.choice(front))
        case "one more":
            front.insert(0, other.chunks[0])
        case "one fewer" if spare := [at for at in range(last) if at not in item.question.needs]:
            del front[chance.choice(spare)]
        case "replaced" if front:
            front[chance.choice([at for at in item.question.needs if at < last] or [0])] = other.chunks[0]
        case _:
            return None
    gap = chance.choice([one for one in GAPS if one.strip()]) if drift == "other words" else ""
    prompt: list[Segment] = [first_words] if first_words else []
    for at, chunk in enumerate([*front, *rest]):
        prompt += [gap, chunk] if gap and at else [chunk]
    return replace(item, chunks=[*front, *rest], prompt=[*prompt, item.question.text])


def score(arms: Mapping[str, Sequence[Arm]]) -> dict[str, Any]:
    """What the patches of another prompt close, and what their own would."""
    blind = mean_kl(arms["blind"])
    return {
        "n": len(arms["blind"]),
        "kl_blind": blind,
        "eta": closed(mean_kl(arms["drifted"]), blind),
        "eta_exact": closed(mean_kl(arms["exact"]), blind),
        "flips": flips(arms["blind"]),
        "restored": restored(arms["drifted"], arms["blind"]),
        "restored_exact": restored(arms["exact"], arms["blind"]),
        "harmed": sum(
            one.changed and not other.changed for one, other in zip(arms["drifted"], arms["blind"], strict=True)
        ),
    }


def plot(report: Report, path: Path) -> None:
    """η by drift, a panel a model: patches of the other prompt, and its own."""
    models = list(report.summary)
    figure = Figure(figsize=(7 * max(1, len(models)), 4), layout="constrained")
    for axes, model in zip(figure.subplots(1, max(1, len(models)), squeeze=False)[0], models, strict=False):
        rows = [row for row in report.rows if row["model"] == model]
        for number, (key, label) in enumerate((("eta", "patches of another prompt"), ("eta_exact", "its own"))):
            places = [at + 0.4 * number for at in range(len(rows))]
            axes.bar(places, [row[key] or 0 for row in rows], 0.38, label=label)
        axes.set_xticks([at + 0.2 for at in range(len(rows))], [row["drift"] for row in rows])
        axes.axhline(0, color="0.6", linewidth=0.8)
        axes.set(ylabel="η", title=model)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
