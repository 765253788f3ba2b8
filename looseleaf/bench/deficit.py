"""What shape has that which reuse loses? Looks at the deficit of a chunk, behind the figures of two papers.

The deficit is a chunk's KV computed in context less the one stored for it, keys un-rotated (Kamera §2, §4): how deep it
lies, what of it comes from the place alone, over how many tokens and heads it spreads, in how few directions, how many
of the keys in front a chunk looks at; and for the first-k family of policies, which tokens later ones attend to and
whose keys are furthest off (InfoBlend's insights 2 and 3). Plain functions over KV rows; `measure` takes the rows from
a running system, `plot` draws. Nothing here asks a question or counts an answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d, adaptive_avg_pool2d

from looseleaf.engine.request import Request
from looseleaf.kv.attention import Capture
from looseleaf.kv.layout import KVRows
from looseleaf.kv.records import ChunkKV
from looseleaf.link.linker import Keep
from looseleaf.link.policies import Reprefill
from looseleaf.patch.deficit import Deficit, find_deficit, wide
from looseleaf.prompt.chunks import Prompt, Span
from looseleaf.prompt.segments import Segment
from looseleaf.system import Looseleaf

PARTS = 16
"""Equal parts of a chunk that positions are told apart by."""
RANKS = 32
"""Directions a curve goes up to."""
FELT = 0.05
"""Layers whose deficit is a smaller share of their KV than this have no rank worth averaging."""
SHOWN_RANKS = (1, 2, 4, 8, 16, 32)
"""Directions whose share of the energy is kept layer by layer."""
TILES = 12, 8
"""Parts of tokens and of features a layer's map has."""
CHOSEN = 0.25
"""Of the tokens, chosen by one layer's deficit."""
ELSEWHERE = 64
"""Positions between the preamble and a chunk that is moved to see what the place alone does."""


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


def chosen_by_layer(deficit: Deficit, share: float = CHOSEN) -> list[float]:
    """Energy of all layers in the tokens that one layer would choose by its keys; without the first layer."""
    energy = token_energy(deficit)
    count = round(share * len(energy))
    picks = [delta.square().sum(1).topk(count).indices for delta in deficit.keys[1:]]
    return [float(energy[pick].sum() / energy.sum().clamp_min(1e-30)) for pick in picks]


def heads_carry(deltas: Sequence[Tensor], heads: int) -> list[float]:
    """Share of a layer's energy that its best 1, 2, 3 … heads carry, mean over layers."""
    layers = [carried(delta.view(len(delta), heads, -1).square().sum((0, 2))) for delta in deltas[1:]]
    return torch.stack(layers).mean(0).tolist()


def tile(delta: Tensor, whole: Tensor) -> list[list[float]]:
    """A layer's deficit by parts of tokens and features: its root mean square over the layer's."""
    size = (whole / delta.numel()).sqrt().clamp_min(1e-30)
    pooled: Tensor = adaptive_avg_pool2d(delta.square()[None], TILES)[0].sqrt() / size
    return pooled.tolist()


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


@dataclass(frozen=True, kw_only=True)
class Look:
    """What is looked at of one chunk of a prompt."""

    conditioned: KVRows
    """Its rows in context, keys un-rotated."""
    alone: KVRows
    elsewhere: KVRows
    """Alone, further away from the preamble."""
    mass: Tensor
    """[token]: attention that all later tokens pay it."""
    links: Tensor
    """[slot in front]: attention that its tokens pay there."""


def measure(ll: Looseleaf, prompt: Prompt, span: Span, segment: Segment) -> dict[str, Any]:
    """Every look at one stored chunk of a prompt; `segment` is what it was made of."""
    assert span.chunk is not None
    record = ll.store.get(ll.linker.keys.kv(span.chunk))
    assert isinstance(record, ChunkKV), "the chunk is not stored: there is nothing to compare with"
    rows, mass = in_context(ll, prompt, span)
    home = ll.builder.build([segment, "?"])
    further = home.positions + ELSEWHERE * (torch.arange(len(home)) >= home.chunks[0].start)
    elsewhere, _ = in_context(ll, replace(home, positions=further, next_pos=home.next_pos + ELSEWHERE), home.chunks[0])
    links = attention(ll, prompt, span.stop, span.start)[: span.start]
    return describe(Look(conditioned=rows, alone=record.rows, elsewhere=elsewhere, mass=mass, links=links))


def in_context(ll: Looseleaf, prompt: Prompt, span: Span) -> tuple[KVRows, Tensor]:
    """A chunk's rows computed in this prompt, keys un-rotated, and the attention [token] all later tokens pay it."""
    rows = KVRows(ll.adapter.layout, len(span), ll.adapter.device)
    mass = attention(ll, prompt, len(prompt), span.stop, Capture(rows=rows, first=span.start))
    return rows, mass[span.start : span.stop]


@torch.inference_mode()
def attention(ll: Looseleaf, prompt: Prompt, stop: int, first: int, capture: Capture | None = None) -> Tensor:
    """[slot]: attention that a prompt's tokens from `first` on, up to `stop`, pay to each slot."""
    plan = ll.engine.plan(Request(prompt=prompt, policy=Reprefill()))
    linked = ll.linker.link(prompt, plan, capacity=len(prompt), keep=Keep())
    lane = linked.take(stop)
    lane.capture = capture or Capture()
    lane.capture.mass_from = first
    ll.adapter.decoder.run([lane])
    linked.release()
    assert lane.capture.mass is not None
    return lane.capture.mass.cpu()


def describe(look: Look) -> dict[str, Any]:
    """The looks as numbers."""
    deficit, moved = find_deficit(look.conditioned, look.alone), find_deficit(look.elsewhere, look.alone)
    energy, distance = token_energy(deficit), key_distance(look.conditioned, look.alone)
    tokens, layer = len(energy), look.alone.layout.layers[0]
    content = "values" if layer.latent else "keys"  # MLA's keys are its rope band: what a token says is in the latent
    planes, whole = getattr(deficit, content), deficit.value_energy if layer.latent else deficit.key_energy
    curve = np.interp(np.linspace(0, tokens, 21), np.arange(tokens + 1), [0.0, *carried(energy).tolist()])
    found: dict[str, Any] = {
        "tokens": tokens,
        "keys_by_layer": relative_by_layer(deficit.keys, deficit.key_energy),
        "values_by_layer": relative_by_layer(deficit.values, deficit.value_energy),
        "position_by_layer": relative_by_layer(moved.keys, moved.key_energy),
        "tokens_50": needed(energy, 0.5) / tokens,
        "tokens_90": needed(energy, 0.9) / tokens,
        "energy_by_tokens": curve.tolist(),
        "chosen_by_layer": chosen_by_layer(deficit),
        "chosen_by_oracle": float(carried(energy)[round(CHOSEN * tokens) - 1]),
        "links": len(look.links),
        "links_90": needed(look.links, 0.9),
        "map": [tile(*pair) for pair in zip(planes, whole, strict=True)],
        "attention_by_position": by_position(look.mass),
        "attention_first_quarter": first_share(look.mass),
        "distance_by_position": by_position(distance),
        "distance_first_quarter": first_share(distance),
    }
    if layer.keys.heads > 1:
        found["energy_by_heads"] = heads_carry(deficit.keys, layer.keys.heads)
    for name, deltas in (("keys", deficit.keys), ("values", deficit.values)):
        found |= _ranks(name, deltas, found[f"{name}_by_layer"])
    return found | {name.replace(content, "content", 1): one for name, one in found.items() if name.startswith(content)}


def _ranks(name: str, deltas: Sequence[Tensor], relative: Sequence[float]) -> dict[str, Any]:
    """Rank for some shares of the energy, and the energy by rank: means over the layers that have a deficit."""
    every = [direction_energy(delta) for delta in deltas]
    by_layer = [[float(carried(one)[min(rank, len(one)) - 1]) for rank in SHOWN_RANKS] for one in every]
    found: dict[str, Any] = {f"{name}_carried_by_layer": by_layer}
    energies = [one for one, share in zip(every, relative, strict=True) if share >= FELT]
    if not energies:
        return found
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
        found[key] = np.mean([shape[key] for shape in shapes if key in shape], axis=0).round(4).tolist()
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
