"""What shape has that which reuse loses? Five looks at the deficit of a chunk, behind the figures of two papers.

The deficit is a chunk's KV computed in context less the one stored for it, keys un-rotated (Kamera §2, §4): how deep it
lies, over how many tokens it spreads, in how few directions; and for the first-k family of policies, which tokens later
ones attend to and whose keys are furthest off (InfoBlend's insights 2 and 3). Plain functions over KV rows; `measure`
takes the rows from a running system, `plot` draws. Nothing here asks a question or counts an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d

from looseleaf.engine.request import Request
from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import ChunkKV
from looseleaf.link.linker import Keep
from looseleaf.link.policies import Reprefill
from looseleaf.patch.deficit import Deficit, find_deficit, wide
from looseleaf.prompt.chunks import Prompt, Span
from looseleaf.system import Looseleaf

PARTS = 16
"""Equal parts of a chunk that positions are told apart by."""
RANKS = 32
"""Directions a curve goes up to."""
FELT = 0.05
"""Layers whose deficit is a smaller share of their KV than this have no rank worth averaging."""


def relative_by_layer(deltas: Sequence[Tensor], energy: Sequence[Tensor]) -> list[float]:
    """The deficit's norm as a share of the conditioned plane's, layer by layer."""
    return [float(delta.norm() / whole.clamp_min(1e-30).sqrt()) for delta, whole in zip(deltas, energy, strict=True)]


def token_energy(deficit: Deficit) -> Tensor:
    """[token]: what each token has of the deficit over all layers; every plane counts by its share of the KV."""
    planes = zip((*deficit.keys, *deficit.values), (*deficit.key_energy, *deficit.value_energy), strict=True)
    return torch.stack([delta.square().sum(1) / whole.clamp_min(1e-30) for delta, whole in planes]).sum(0)


def direction_energy(delta: Tensor) -> Tensor:
    """Squared singular values of one layer's deficit [token, width], largest first."""
    return torch.linalg.svdvals(delta).square()


def carried(energy: Tensor) -> Tensor:
    """Share of all energy that the best 1, 2, 3 … carry. energy [one]; nothing to carry counts as carried."""
    best = energy.double().sort(descending=True).values.cumsum(0)
    return best / best[-1] if best[-1] > 0 else torch.ones_like(best)


def needed(energy: Tensor, share: float) -> int:
    """How many of the best carry `share` of the energy: tokens an oracle must choose, or the rank of a patch."""
    if not energy.any():
        return 0
    return int((carried(energy) < share * (1 - 1e-9)).sum()) + 1


def key_distance(conditioned: KVRows, blind: KVRows) -> Tensor:
    """[token]: L1 distance of a token's two un-rotated keys, over the mean size of a key, mean over layers."""
    layers = []
    for own, alone in zip(conditioned.keys, blind.keys, strict=True):
        size = wide(own).abs().sum(1).mean().clamp_min(1e-30)
        layers.append((wide(own) - wide(alone)).abs().sum(1) / size)
    return torch.stack(layers).mean(0)


def by_position(score: Tensor, parts: int = PARTS) -> list[float]:
    """Scores [token] of equal parts of a chunk from its first token to its last, over the chunk's mean."""
    mean = score.double().mean().clamp_min(1e-30)
    pooled: Tensor = adaptive_avg_pool1d((score.double() / mean)[None], parts)[0]
    return pooled.tolist()


def first_share(score: Tensor, share: float = 0.25) -> float:
    """What the first tokens of a chunk have of a score [token] all its tokens share."""
    return float(score[: round(share * len(score))].sum() / score.sum().clamp_min(1e-30))


def measure(ll: Looseleaf, prompt: Prompt, span: Span) -> dict[str, Any]:
    """All five looks at one stored chunk of a prompt."""
    conditioned, mass = in_context(ll, prompt, span)
    assert span.chunk is not None
    record = ll.store.get(ll.linker.keys.kv(span.chunk))
    assert isinstance(record, ChunkKV), "the chunk is not stored: there is nothing to compare with"
    return describe(conditioned, record.rows, mass)


@torch.inference_mode()
def in_context(ll: Looseleaf, prompt: Prompt, span: Span) -> tuple[KVRows, Tensor]:
    """A chunk's rows computed in this prompt, keys un-rotated, and the attention [token] all later tokens pay it."""
    plan = ll.engine.plan(Request(prompt=prompt, policy=Reprefill()))
    linked = ll.linker.link(prompt, plan, capacity=len(prompt), keep=Keep())
    lane = linked.take(len(prompt))
    rows = KVRows(ll.adapter.layout, len(span), ll.adapter.device)
    lane.capture = Capture(rows=rows, first=span.start, mass_from=span.stop)
    ll.adapter.decoder.run([lane])
    linked.release()
    assert lane.capture.mass is not None
    return rows, lane.capture.mass[span.start : span.stop].cpu()


def describe(conditioned: KVRows, blind: KVRows, mass: Tensor) -> dict[str, Any]:
    """The five looks as numbers. mass [token]: attention paid to each."""
    deficit = find_deficit(conditioned, blind)
    energy, distance = token_energy(deficit), key_distance(conditioned, blind)
    tokens = len(energy)
    curve = np.interp(np.linspace(0, tokens, 21), np.arange(tokens + 1), [0.0, *carried(energy).tolist()])
    found: dict[str, Any] = {
        "tokens": tokens,
        "keys_by_layer": relative_by_layer(deficit.keys, deficit.key_energy),
        "values_by_layer": relative_by_layer(deficit.values, deficit.value_energy),
        "tokens_50": needed(energy, 0.5) / tokens,
        "tokens_90": needed(energy, 0.9) / tokens,
        "energy_by_tokens": curve.tolist(),
        "attention_by_position": by_position(mass),
        "attention_first_quarter": first_share(mass),
        "distance_by_position": by_position(distance),
        "distance_first_quarter": first_share(distance),
    }
    for name, deltas in (("keys", deficit.keys), ("values", deficit.values)):
        found |= _ranks(name, deltas, found[f"{name}_by_layer"])
    return found


def _ranks(name: str, deltas: Sequence[Tensor], relative: Sequence[float]) -> dict[str, Any]:
    """Rank for some shares of the energy, and the energy by rank: means over the layers that have a deficit."""
    energies = [direction_energy(delta) for delta, share in zip(deltas, relative, strict=True) if share >= FELT]
    if not energies:
        return {}
    found: dict[str, Any] = {}
    for share in (50, 90, 99):
        found[f"{name}_rank_{share}"] = sum(needed(one, share / 100) for one in energies) / len(energies)
    curves = torch.ones(len(energies), RANKS, dtype=torch.float64)
    for row, one in zip(curves, energies, strict=True):
        part = carried(one)[:RANKS]
        row[: len(part)] = part
    found[f"{name}_energy_by_rank"] = curves.mean(0).tolist()
    return found


def average(shapes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over chunks, number by number; a number some chunks lack is the mean over those that have it."""
    found: dict[str, Any] = {"chunks": len(shapes)}
    for key in dict.fromkeys(key for shape in shapes for key in shape):
        table = torch.tensor([shape[key] for shape in shapes if key in shape], dtype=torch.float64)
        found[key] = (
            [round(one, 4) for one in table.mean(0).tolist()] if table.dim() > 1 else round(float(table.mean()), 4)
        )
    return found


PANELS = (
    ("relative deficit by layer", "layer", ("keys_by_layer", "values_by_layer")),
    ("energy in the best tokens", "share of tokens", ("energy_by_tokens",)),
    ("energy by rank, un-rotated", "rank", ("keys_energy_by_rank", "values_energy_by_rank")),
    ("attention of later tokens", "place in the chunk", ("attention_by_position",)),
    ("distance of keys", "place in the chunk", ("distance_by_position",)),
)


def plot(shapes: Mapping[str, Mapping[str, Mapping[str, Any]]], path: Path) -> None:
    """Five panels a model, a line a task; keys solid, values dashed. shapes: model → task → numbers."""
    figure = Figure(figsize=(19, 3.8 * max(1, len(shapes))), layout="constrained")
    grid = figure.subplots(max(1, len(shapes)), len(PANELS), squeeze=False)
    for line, (model, tasks) in zip(grid, shapes.items(), strict=True):
        for axes, (title, across, keys) in zip(line, PANELS, strict=True):
            for colour, (task, shape) in enumerate(tasks.items()):
                for key, style in zip(keys, ("-", "--"), strict=False):
                    if key in shape:
                        label = task if style == "-" else None
                        axes.plot(_across(across, shape[key]), shape[key], style, color=f"C{colour}", label=label)
            axes.set_title(f"{model}: {title}", fontsize=10)
            axes.set_xlabel(across)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _across(what: str, curve: Sequence[float]) -> list[float]:
    if what == "layer":
        return [float(at) for at in range(len(curve))]
    if what == "rank":
        return [at + 1.0 for at in range(len(curve))]
    if what == "share of tokens":
        return [at / (len(curve) - 1) for at in range(len(curve))]
    return [(at + 0.5) / len(curve) for at in range(len(curve))]
