"""What may be reused of this model, and how far? The measurement behind `looseleaf calibrate`.

Held-out drawings and questions about them, of which only the model's own answers matter: each is computed in full, then
reached by blind reuse, by computing each image's first tokens, and by patches of several shares. The smallest patch
that closes enough is tried without the shallow layers, and in other prompts that differ in one way. Along re-prefill's
answer: KL, and answers that change. Works for any model that can be opened; one not trained on the drawings may answer
nonsense, which is compared all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from looseleaf.bench.cases import (
    CONTROL,
    Arm,
    Asking,
    Case,
    Outcome,
    Try,
    by_cell,
    closed,
    make_cases,
    mean_kl,
    rounds,
    tasks,
    try_all,
)  # fmt: skip
from looseleaf.bench.envelope import ask_drifted, drifting_tasks
from looseleaf.bench.report import commit
from looseleaf.bench.reuse import MOVED, PIECE
from looseleaf.kv.records import Patch
from looseleaf.link.calibration import Calibration, Loss
from looseleaf.link.policies import FirstK, FullReuse, PatchForm, Reprefill
from looseleaf.patch.form import cut, patch_of
from looseleaf.system import Looseleaf
from looseleaf.workloads.bounds import HELD_OUT, Bounds

COUNT = 16
"""Questions of a task and number of hops."""
SHARES = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0)
"""Of a page's bytes, tried from the smallest on."""
DEPTHS = (0.25, 0.5, 0.75)
"""Of the layers that may go without a patch."""
ENOUGH, RESTORED = 0.97, 0.97
"""η and the share of flips restored that a patch must reach."""
CLOSE, HARMED = 0.9, 0.02
"""η a drifted patch must reach, and the share of answers it may change that blind reuse had kept."""
TIE = 0.01
"""Nats: an answer that changes at a smaller KL was undecided, and is not counted as changed. In bf16 the two likeliest
tokens of such a one often tie to the last bit."""
SPARED = 0.01
"""η that may be lost by leaving shallow layers alone."""
FOUND_AS = {
    "other words": "words", "many words": "words", "exchanged": "order", "one fewer": "fewer", "one twice": "again",
}  # fmt: skip
"""Drifts by how `Auto` knows them; the others must never be followed."""
BLIND, NOISE = "full-reuse", "reprefill, moved"
OWN_SEEDS = 1_000_000
"""What a bench reports on was never calibrated on: its seeds begin at 0."""


def calibrate(
    ll: Looseleaf, *, count: int = COUNT, seed: int = 0, tell: Callable[[str], None] = lambda stage: None
) -> Calibration:
    """Measure a model that is open."""
    bounds = HELD_OUT.get(ll.adapter.model.config.model_type, HELD_OUT["qwen2_5_vl"])
    every, drifting = tasks(bounds), drifting_tasks(bounds)
    if not ll.adapter.sees_images:
        bounds, every, drifting = replace(bounds, counts=(2,)), [CONTROL], [CONTROL]  # two pages of words
    asking = Asking(count=count, seed=OWN_SEEDS + seed, tell=tell)
    arms = _arms(ll, bounds, every, asking, lambda case: _plain(ll, case) | _patched(ll, case, SHARES, (0.0,)))
    ways = {name: loss(arms[name], arms[BLIND]) for name in arms if name not in (BLIND, NOISE)}
    share = next((one for one in SHARES if _enough(ways[_of_share(one)])), SHARES[-1])
    deep_arms = _arms(ll, bounds, every, asking, lambda case: _patched(ll, case, (share,), (0.0, *DEPTHS)))
    deep = {name: loss(deep_arms[name], deep_arms[BLIND]) for name in deep_arms}
    from_layer = _from_layer(deep, share, len(ll.adapter.layout.layers))
    ways |= {_of_share(share, depth): deep[_of_share(share, depth)] for depth in DEPTHS}
    drifts, harmed, survivors = _drifts(ll, bounds, drifting, asking, PatchForm(share=share, from_layer=from_layer))
    return Calibration(
        model=ll.adapter.name, fingerprint=ll.adapter.fingerprint, dtype=ll.dtype,
        canonical=ll.builder.canonical.identity, seed=seed, commit=commit(), noise_kl=mean_kl(arms[NOISE]),
        ways={BLIND: loss(arms[BLIND], arms[BLIND]), **ways}, drifts=drifts, survivors=survivors, share=share,
        from_layer=from_layer, close=_allowed(drifts, harmed),
        removal=survivors is not None and survivors.eta is not None and survivors.eta < CLOSE,
    )  # fmt: skip


def loss(arms: Sequence[Arm], blind: Sequence[Arm]) -> Loss:
    """What some answers lose, beside what blind reuse does."""
    flips = [at for at, one in enumerate(blind) if _changed(one)]
    return Loss(
        n=len(arms), kl=mean_kl(arms), changed=sum(map(_changed, arms)), flips=len(flips),
        restored=sum(not _changed(arms[at]) for at in flips), eta=closed(mean_kl(arms), mean_kl(blind)),
    )  # fmt: skip


def _changed(one: Arm) -> bool:
    return one.changed and one.kl > TIE


def _arms(
    ll: Looseleaf, bounds: Bounds, asked: Sequence[str], asking: Asking, ways: Callable[[Case], Mapping[str, Try]]
) -> dict[str, list[Arm]]:
    """Blind reuse and some ways, over all questions."""
    outcomes = []
    for task in asked:
        for hops in (1, 2):
            for _, some in rounds(bounds, task, hops, asking):
                cases = make_cases(ll, some)
                tries = [{BLIND: Try(policy=FullReuse()), **ways(case)} for case in cases]
                outcomes += [Outcome(cell=None, arms=arms) for arms in try_all(ll, cases, tries)]
    (found,) = by_cell(outcomes).values()
    return found


def _plain(ll: Looseleaf, case: Case) -> dict[str, Try]:
    """Ways without a patch."""
    return {"first-k:32": Try(policy=FirstK(k=32)), NOISE: _again(ll, case)}


def _patched(ll: Looseleaf, case: Case, shares: Sequence[float], depths: Sequence[float]) -> dict[str, Try]:
    """Patches of every share and depth."""
    layers = len(ll.adapter.layout.layers)
    whole = {at: patch_of(one, case.alone[at], share=max(shares)) for at, one in case.deficits.items()}
    return {
        _of_share(share, depth): Try(patches=_cut(whole, share, _layer(depth, layers)))
        for share in shares
        for depth in depths
    }


def _again(ll: Looseleaf, case: Case) -> Try:
    """Everything computed once more, moved as a whole and in pieces."""
    return Try(policy=Reprefill(), prompt=ll.builder.build(case.item.prompt, start_pos=MOVED), max_rows=PIECE)


def _cut(patches: Mapping[int, Patch], share: float, from_layer: int) -> dict[int, Patch]:
    return {at: cut(one, share=share, from_layer=from_layer) for at, one in patches.items()}


def _of_share(share: float, depth: float = 0.0) -> str:
    return f"patch {share:.0%}" + (f", layers from {depth:.0%} on" if depth else "")


def _layer(depth: float, layers: int) -> int:
    return min(layers - 1, round(depth * layers))


def _enough(one: Loss) -> bool:
    return (one.eta is None or one.eta >= ENOUGH) and one.restored >= RESTORED * one.flips


def _from_layer(ways: Mapping[str, Loss], share: float, layers: int) -> int:
    """The deepest first layer that costs next to nothing."""
    full = ways[_of_share(share)]
    for depth in reversed(DEPTHS):
        one = ways[_of_share(share, depth)]
        spared = one.eta is not None and full.eta is not None and one.eta >= full.eta - SPARED
        if spared and one.restored >= full.restored:
            return _layer(depth, layers)
    return 0


def _drifts(
    ll: Looseleaf, bounds: Bounds, asked: Sequence[str], asking: Asking, form: PatchForm
) -> tuple[dict[str, Loss], dict[str, int], Loss | None]:
    """By drift: what patches of the other prompt lose, how many answers they spoil, and what whole rows would lose."""
    drifting = replace(asking, tell=lambda stage: asking.tell(f"drifts: {stage}"))
    found = by_cell(ask_drifted(ll, bounds, asked, drifting, form=form))
    losses = {drift: loss(arms["drifted"], arms["blind"]) for drift, arms in found.items()}
    harmed = {
        drift: sum(
            _changed(one) and not other.changed for one, other in zip(arms["drifted"], arms["blind"], strict=True)
        )
        for drift, arms in found.items()
    }
    gone = found.get("one fewer")
    return losses, harmed, loss(gone["whole"], gone["blind"]) if gone else None


def _allowed(drifts: Mapping[str, Loss], harmed: Mapping[str, int]) -> str:
    """The drifts whose patches may be used, as `Auto` takes them."""
    good: dict[str, bool] = {}
    for drift, name in FOUND_AS.items():
        if drift in drifts:
            one = drifts[drift]
            fine = (one.eta is None or one.eta >= CLOSE) and harmed[drift] <= HARMED * one.n
            good[name] = good.get(name, True) and fine
    if not good.get("words"):  # the others come with other words
        return "none"
    return "+".join(name for name, fine in good.items() if fine)


def rows_of(found: Calibration) -> list[dict[str, Any]]:
    """A calibration as a table."""
    named = {**found.ways, **{f"drift: {name}": one for name, one in found.drifts.items()}}
    if found.survivors is not None:
        named["rows kept when one in front is gone"] = found.survivors
    return [
        {"way": name, "n": one.n, "kl": one.kl, "eta": one.eta, "changed": one.changed,
         "restored": f"{one.restored}/{one.flips}"}
        for name, one in named.items()
    ]  # fmt: skip
