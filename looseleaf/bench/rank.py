"""How does recovery grow with rank, depth, basis and tokens?

Multi-hop questions with pictures; every chunk of a prompt gets a patch of the same share of its page's bytes in every
layer it patches: all of them; the deep half (half of the bytes); cut in the home frame (keys turned to where the chunk
was computed) instead of un-rotated; or as coefficients in a basis learned from other items. Against them, tokens: the
first ones computed again at that share, and an oracle that replaces the tokens with the largest deficit by their rows
in context. η = 1 - KL(arm) / KL(blind).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from looseleaf.bench.cases import (
    CONTROL,
    Arm,
    Asking,
    Case,
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
from looseleaf.bench.deficit import token_energy
from looseleaf.bench.models import ask_each
from looseleaf.bench.report import BenchOptions, Report, Share
from looseleaf.kv.records import Factors, Patch
from looseleaf.link.policies import FirstK
from looseleaf.model.rotary import rotate, unrotate
from looseleaf.patch.basis import Basis, learn_basis, patch_in
from looseleaf.patch.deficit import Deficit, wide
from looseleaf.patch.form import cut, factor_all, patch_of, rank_within
from looseleaf.prompt.chunks import Span
from looseleaf.system import Looseleaf

SHARES = (0.01, 0.03, 0.06, 0.12, 0.25, 0.5)
"""Of a page's bytes, or of its tokens."""
COUNT, QUICK_COUNT, LEARNED = 200, 1, 16
"""Questions a task; items a task that a basis is learned from."""
ENOUGH = 0.9
"""The knee: the smallest rank that closes this much."""


def run(options: BenchOptions, tell: Callable[[str], None] = lambda stage: None) -> Report:
    """Every model: a row for every arm and share over all tasks."""
    report = Report(bench="rank", options=options)
    count = options.count or (QUICK_COUNT if options.quick else COUNT)
    for name, outcomes in ask_each(options, count, ask, tell):
        (found,) = by_cell(outcomes).values()
        rows = [{"model": name, **row} for row in score(found)]
        report.rows += rows
        report.summary[name] = summarise(rows)
    return report


def ask(ll: Looseleaf, asking: Asking) -> list[Outcome]:
    """One model; arms by name and share."""
    asked = [task for task in tasks(bounds_of(ll)) if task != CONTROL]
    asking.tell("learning a basis")
    learning = Asking(count=min(asking.count, LEARNED), seed=asking.seed + 1)
    basis = learn_basis(
        one
        for task in asked
        for _, some in rounds(bounds_of(ll), task, 2, learning)
        for case in make_cases(ll, some)
        for one in case.deficits.values()
    )
    found = []
    for task in asked:
        for _, some in rounds(bounds_of(ll), task, 2, asking):
            cases = make_cases(ll, some)
            arms = try_all(ll, cases, [ways(ll, case, basis) for case in cases])
            found += [Outcome(cell=None, arms=one) for one in arms]
    return found


def ways(ll: Looseleaf, case: Case, basis: Basis) -> dict[tuple[str, float], Try]:
    """One case's ways by arm and share."""
    middle = len(ll.adapter.layout.layers) // 2
    deficits = case.deficits
    spans = {span.start: span for span in case.prompt.chunks}
    whole = {start: patch_of(one, case.alone[start], share=1) for start, one in deficits.items()}
    home = {start: _in_home_frame(ll, case, spans[start], whole[start]) for start in spans}
    energy = {start: token_energy(one) for start, one in deficits.items()}
    tokens = sum(map(len, spans.values())) / len(spans)
    found = {("blind", 0.0): Try()}
    for share in SHARES:
        arms: dict[str, dict[int, Patch]] = {
            "patch": {start: cut(one, share=share) for start, one in whole.items()},
            "deep half": {start: cut(one, share=share, from_layer=middle) for start, one in whole.items()},
            "home frame": {start: one(share) for start, one in home.items()},
            "shared basis": {
                start: patch_in(basis, one, case.alone[start], share=share) for start, one in deficits.items()
            },
            "oracle tokens": {
                start: _best_tokens(one, energy[start], share, case.alone[start].layout.dtype)
                for start, one in deficits.items()
            },
        }
        found |= {(name, share): Try(patches=patches) for name, patches in arms.items()}
        found["first tokens", share] = Try(policy=FirstK(k=round(share * tokens)))
    return found


def _in_home_frame(ll: Looseleaf, case: Case, span: Span, whole: Patch) -> Callable[[float], Patch]:
    """Patches whose keys were cut in the frame of the chunk's own positions, turned back: what that frame costs."""
    assert span.chunk is not None
    decoder, alone, conditioned = ll.adapter.decoder, case.alone[span.start], case.conditioned[span.start]
    home = span.chunk.placement.positions.to(ll.adapter.device) + len(ll.linker.canonical.ids)
    phase = decoder.phase(home)
    deltas = [
        wide(rotate(own, phase, decoder.form)) - wide(rotate(other, phase, decoder.form))
        for own, other in zip(conditioned.keys, alone.keys, strict=True)
    ]
    turned = factor_all(deltas, [min(delta.shape) for delta in deltas])

    def shortened(share: float) -> Patch:
        keys = []
        for one, plane in zip(turned, alone.keys, strict=True):
            heads, tokens, dim = plane.shape
            rank = rank_within(share, tokens, heads * dim)
            dense = (one.left[:, :rank] @ one.right[:, :rank].mT).view(tokens, heads, dim).transpose(0, 1)
            back = wide(unrotate(dense.contiguous(), phase, decoder.form))
            keys.append(_dense(back, plane.dtype))
        return Patch(keys=tuple(keys), values=cut(whole, share=share).values)

    return shortened


def _dense(matrix: torch.Tensor, dtype: torch.dtype) -> Factors:
    """Any matrix as factors, for what no patch would keep."""
    return Factors(left=matrix.to(dtype), right=torch.eye(matrix.shape[1], dtype=dtype, device=matrix.device))


def _best_tokens(deficit: Deficit, energy: torch.Tensor, share: float, dtype: torch.dtype) -> Patch:
    """The rows in context of the tokens with the largest deficit, and nothing of the others."""
    kept = torch.zeros(len(energy), 1, device=energy.device)
    kept[energy.topk(round(share * len(energy))).indices] = 1
    keys, values = (tuple(_dense(kept * one, dtype) for one in planes) for planes in (deficit.keys, deficit.values))
    return Patch(keys=keys, values=values)


def score(found: Mapping[tuple[str, float], Sequence[Arm]]) -> list[dict[str, Any]]:
    """A row for every arm and share."""
    blind = found["blind", 0.0]
    rows = []
    ranks = {share: [one.rank for one in each] for (arm, share), each in found.items() if arm == "patch"}
    for (arm, share), each in found.items():
        right = Share(right=sum(one.right for one in each), n=len(each))
        low, high = right.interval
        rows.append({
            "arm": arm, "share": share, "bytes": sum(one.share for one in each) / len(each),
            "rank": sum(ranks[share]) / len(ranks[share]) if share else 0.0,
            "n": right.n, "accuracy": right.value, "low": low, "high": high,
            "kl": mean_kl(each), "eta": closed(mean_kl(each), mean_kl(blind)),
            "flips": flips(blind), "restored": restored(each, blind),
        })  # fmt: skip
    return rows


def summarise(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The knee, and what depth, a basis and tokens come to."""
    eta = {(row["arm"], row["share"]): row["eta"] for row in rows}
    knee = next((row["rank"] for row in rows if row["arm"] == "patch" and (row["eta"] or 0) >= ENOUGH), None)
    return {
        "knee_rank": knee,
        "patch6_eta": eta["patch", 0.06],
        "patch25_eta": eta["patch", 0.25],
        "deep_half_eta": eta["deep half", 0.25],
        "home_frame_eta": eta["home frame", 0.25],
        "shared_basis_eta": eta["shared basis", 0.25],
        "first_half_tokens_eta": eta["first tokens", 0.5],
        "oracle_half_tokens_eta": eta["oracle tokens", 0.5],
    }


def plot(report: Report, path: Path) -> None:
    """η by share of the bytes, a panel a model, a line an arm."""
    models = list(report.summary)
    figure = Figure(figsize=(7 * max(1, len(models)), 4.5), layout="constrained")
    for axes, model in zip(figure.subplots(1, max(1, len(models)), squeeze=False)[0], models, strict=False):
        rows = [row for row in report.rows if row["model"] == model and row["share"]]
        for arm in dict.fromkeys(row["arm"] for row in rows):
            own = [row for row in rows if row["arm"] == arm and row["eta"] is not None]
            style = "--" if "tokens" in arm else "-"
            across = [row["share"] if "tokens" in arm else row["bytes"] for row in own]
            axes.plot(across, [row["eta"] for row in own], style, marker="o", label=arm)
        axes.set_xscale("log")
        axes.set_xticks(SHARES, [f"{share:.0%}" for share in SHARES])
        axes.set_ylim(min(-0.1, axes.get_ylim()[0]), 1.02)
        axes.set(xlabel="share of the page's bytes (dashed: of its tokens)", ylabel="η", title=model)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
