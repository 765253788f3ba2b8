"""What does each policy cost in accuracy?

Held-out questions of every task the embedded models were trained on, single-hop and multi-hop, through the engine: the
pictures of an album are computed once, alone, and stored; then the same question is asked under every policy. Against
re-prefill: accuracy, KL of the answer's distribution, η = 1 - KL(arm) / KL(blind), answers changed, and of those that
blind reuse changes (flips) the share a policy restores. The noise floor is re-prefill against re-prefill of the same
prompt moved as a whole and computed in pieces. Pages given as words are the control: no picture is involved.

Not asked here: an image that later ones were read behind and that is no longer in the prompt. Stored chunks carry no
other image, so the question needs windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from looseleaf.bench import deficit
from looseleaf.bench.models import DTYPE, each_model
from looseleaf.bench.report import BenchOptions, Report, Share
from looseleaf.engine.request import Answer, Request
from looseleaf.errors import ConfigError
from looseleaf.kv.layout import KVLayout
from looseleaf.link.policies import (
    DeepLayers,
    Deviation,
    FirstK,
    FullReuse,
    LayerAdaptive,
    LowRankKeys,
    Patched,
    Policy,
    QueryAware,
    Reprefill,
)  # fmt: skip
from looseleaf.model.embedded import embedded_models
from looseleaf.prompt.chunks import Prompt
from looseleaf.prompt.segments import Document, Segment
from looseleaf.system import Looseleaf
from looseleaf.workloads.albums import HEADLINE, as_segment, headline_question, task_album
from looseleaf.workloads.bounds import HELD_OUT, Bounds
from looseleaf.workloads.questions import Question, held_out

COUNT, QUICK_COUNT, ANALYSED = 500, 3, 16
"""Questions of a task and number of hops (quick: of all models together); chunks of a task that are analysed."""
SHARE = 0.25
"""Of the chunks' tokens, or of their keys' bytes, that policies with a ratio get."""
PATCH_SHARES = (0.06, 0.25)
"""Of a page's bytes that its patch takes."""
DEEP_PATCH = "patch 25%, deep half"
MAX_TOKENS = 16
LITTLE = 1e-3
"""Nats: a smaller loss is none, and a share of it would mean nothing."""
MOVED, PIECE = 64, 48
"""The noise floor: positions a prompt is moved by, and rows it is computed in at a time."""
CEILING, BLIND, NOISE = "reprefill", "full-reuse", "reprefill, moved"
CONTROL = "documents as text"
TOKEN_ARMS = ("first quarter", "deviation", "layer-adaptive", "query-aware")
"""Arms that compute a quarter of the chunks' tokens in context."""
FEW_TOKEN_ARMS = ("first 6%", "deviation 6%")
"""Arms that compute as many tokens as the smaller patch has of the bytes."""
OPENINGS = ("", "", "Look at these. ", "Please look: ")
GAPS = ("", "", "", " and ", "\n", " Here is one more. ", " The next one: ", " Keep it in mind. ")
"""Words before the first entry, and between two."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A question about an album: its pictures and pages, and the prompt that shows them."""

    chunks: list[Segment]
    prompt: list[Segment]
    question: Question


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One question under one policy."""

    right: bool
    kl: float
    changed: bool
    """Whether re-prefill says something else."""
    reused: float
    """Share of the prompt's tokens that were read, not computed."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model and task; with `analyse`, the shape of the deficit too."""
    report = Report(bench="reuse", options=options)
    models = len(options.models or embedded_models())
    count = options.count or (max(1, QUICK_COUNT // max(1, models)) if options.quick else COUNT)
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for name, ll in each_model(options, tell):
        rows = ask_model(ll, name, count, options.seed, tell)
        report.rows += rows
        report.summary[name] = {"dtype": options.dtype or DTYPE, **summarise(rows)}
        if options.analyse is not None:
            shapes[name] = analyse(ll, name, count, options.seed, tell)
            report.summary[name] |= digest(shapes[name])
    if options.analyse is not None:
        report.details["deficit"] = shapes
        deficit.plot(shapes, options.analyse)
    return report


def ask_model(ll: Looseleaf, name: str, count: int, seed: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """All tasks of one model: a row for every task, number of hops and policy."""
    rows = []
    for task in tasks(bounds_of(ll)):
        for hops in (1, 2):
            outcomes: dict[str, list[Outcome]] = {}
            for number, item in enumerate(items(bounds_of(ll), task, hops, count, seed)):
                if number % math.ceil(count / 10) == 0:
                    tell(f"{name}: {task}, {'single' if hops == 1 else 'multi'}-hop, question {number + 1} of {count}")
                for arm, outcome in ask(ll, item).items():
                    outcomes.setdefault(arm, []).append(outcome)
            where = {"model": name, "task": task, "hops": hops}
            rows += [{**where, "policy": arm, **one} for arm, one in score(outcomes).items()]
    return rows


def bounds_of(ll: Looseleaf) -> Bounds:
    """What a model's family is measured on."""
    family = ll.adapter.model.config.model_type
    if family not in HELD_OUT:
        raise ConfigError(f"bench reuse has no questions for {family} models; it has some for {', '.join(HELD_OUT)}")
    return HELD_OUT[family]


def tasks(bounds: Bounds) -> list[str]:
    """The tasks a model was trained on."""
    return [task for task in HEADLINE if bounds.counts_of(task)]


def items(bounds: Bounds, task: str, hops: int, count: int, seed: int) -> Iterator[Item]:
    """`count` held-out questions, each about an album of its own; albums without such a question are passed over."""
    split, made = held_out(), 0
    for number in range(100 * count):
        chance = split.chance("reuse", seed, task, hops, number)
        frames = task in ("clip", "stream")
        size = (bounds.frame_side,) * 2 if frames else bounds.sizes[number % len(bounds.sizes)]
        album = task_album(task, chance, split, size, chance.choice(bounds.counts_of(task)))
        question = headline_question(task, hops, album, chance, split)
        if question is None:
            continue
        chunks: list[Segment] = [as_segment(entry) for entry in album.entries]
        prompt: list[Segment] = []
        for chunk in chunks:
            words = chance.choice(GAPS if prompt else OPENINGS)
            words = words.rstrip(" ") if isinstance(chunk, Document) else words  # a page starts a line of its own
            prompt += [words, chunk] if words else [chunk]
        yield Item(chunks=chunks, prompt=[*prompt, question.text], question=question)
        made += 1
        if made == count:
            return


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
        **{f"patch {share:.0%}": Patched(share=share) for share in PATCH_SHARES},
        DEEP_PATCH: Patched(share=PATCH_SHARES[-1], from_layer=layers // 2),
        "low-rank-keys": LowRankKeys(rank=max(1, round(SHARE * tokens * width / (tokens + width)))),
    }


def ask(ll: Looseleaf, item: Item) -> dict[str, Outcome]:
    """One question under every policy, its chunks stored before."""
    ll.warm(item.chunks, layers=(len(ll.adapter.layout.layers) // 2,))
    prompt = ll.builder.build(item.prompt)
    arms = policies(prompt, ll.adapter.layout)
    computed = ll.linker.counters.chunks_computed
    for policy in arms.values():
        if policy.patch is not None:
            ll.ask(item.prompt, policy=policy, max_tokens=1)  # who computes a chunk in context leaves its patch behind
    ll.settle()
    asked = {arm: ll.request(item.prompt, policy=policy, max_tokens=MAX_TOKENS) for arm, policy in arms.items()}
    asked[NOISE] = ll.request(item.prompt, policy=arms[CEILING], max_tokens=MAX_TOKENS, start_pos=MOVED)
    answers = answer_all(ll, asked)
    told = answers[CEILING].token_ids
    ceiling = ll.reference.along(prompt, arms[CEILING], told)
    outcomes = {}
    for arm, answer in answers.items():
        logits = ceiling
        if arm == NOISE:
            logits = ll.reference.along(asked[NOISE].prompt, arms[CEILING], told, max_rows=PIECE)
        elif arm != CEILING:
            logits = ll.reference.along(prompt, arms[arm], told)
        usage = answer.usage
        outcomes[arm] = Outcome(
            right=answer.text.strip() == item.question.answer,
            kl=divergence(ceiling, logits),
            changed=answer.text != answers[CEILING].text,
            reused=(usage.exact_tokens + usage.relocated_tokens + usage.patched_tokens) / usage.prompt_tokens,
        )
    assert outcomes[BLIND].reused > 0, "nothing was reused: there is nothing to measure"
    assert ll.linker.counters.chunks_computed == computed, "a stored chunk was computed again"
    return outcomes


def answer_all(ll: Looseleaf, asked: Mapping[str, Request]) -> dict[str, Answer]:
    """Greedy answers of the engine to several requests at once."""
    jobs = {name: ll.engine.submit(request) for name, request in asked.items()}
    while ll.engine.step():
        pass
    answers = {}
    for name, job in jobs.items():
        if job.error is not None:
            raise job.error
        assert job.answer is not None
        answers[name] = job.answer
    return answers


def divergence(reference: Tensor, arm: Tensor) -> float:
    """KL(reference ‖ arm) of next-token distributions, mean over places. Logits [place, vocabulary]."""
    expected, got = (torch.log_softmax(one.double(), dim=-1) for one in (reference, arm))
    return max(0.0, float((expected.exp() * (expected - got)).sum(-1).mean()))


def score(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, dict[str, Any]]:
    """Figures of every arm over the same questions."""
    blind = outcomes[BLIND]
    flips = [at for at, one in enumerate(blind) if one.changed]
    kl = {arm: sum(one.kl for one in each) / len(each) for arm, each in outcomes.items()}
    figures = {}
    for arm, each in outcomes.items():
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
            "flips": len(flips),
            "restored": sum(not each[at].changed for at in flips),
            "reused": sum(one.reused for one in each) / len(each),
        }
    return figures


def closed(kl: float, blind: float, noise: float) -> float | None:
    """η, the share of blind reuse's KL an arm closes; None where blind reuse loses nothing worth closing."""
    return 1 - kl / blind if blind > max(noise, LITTLE) else None


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
    return {arm: _pool([row for row in asked if row["policy"] == arm]) for arm in _arms(asked)}


def _arms(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["policy"] for row in rows))


def _pool(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One arm over several tasks, each question counting once."""
    count = sum(row["n"] for row in rows)
    means = {key: sum(row[key] * row["n"] for row in rows) / count for key in ("accuracy", "kl")}
    return means | {key: sum(row[key] for row in rows) for key in ("changed", "flips", "restored")}


def analyse(ll: Looseleaf, name: str, count: int, seed: int, tell: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """The deficit of the last chunk each multi-hop question needs, by task."""
    found = {}
    for task in tasks(bounds_of(ll)):
        tell(f"{name}: {task}, what shape the deficit has")
        shapes = []
        for item in items(bounds_of(ll), task, 2, min(count, ANALYSED), seed):
            ll.warm(item.chunks)
            prompt = ll.builder.build(item.prompt)
            shapes.append(deficit.measure(ll, prompt, prompt.chunks[max(item.question.needs)]))
        found[task] = deficit.average(shapes)
    return found


def digest(shapes: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """What the shapes come to, over the tasks with pictures."""
    asked = [shape for task, shape in shapes.items() if task != CONTROL]
    keys = ("tokens_50", "tokens_90", "keys_rank_90", "values_rank_90", "attention_first_quarter",
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
