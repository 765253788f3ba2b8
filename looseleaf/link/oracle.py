"""Choosing and rebuilding rows from what a pass computed: selections of Deviation and QueryAware, keys of LowRankKeys.

Tensors and spans in, slots or rows out; no policy, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from looseleaf.kv.layout import KVRows
from looseleaf.kv.table import SlotTable
from looseleaf.patch.deficit import wide
from looseleaf.patch.form import factor_all
from looseleaf.prompt.chunks import Span


def most_deviating(
    table: SlotTable,
    sources: Sequence[tuple[Span, KVRows]],
    layer: int,
    share: float,
    turn: Callable[[Span, Tensor], Tensor],
) -> list[int]:
    """Slots whose computed keys and values of `layer` differ most from the stored ones (CacheBlend's selection).

    `turn` rotates a span's stored keys [head, token, dim] to where they stand in the prompt.
    """
    slots: list[int] = []
    scores: list[Tensor] = []
    for span, rows in sources:
        keys = table.rows.keys[layer][:, span.start : span.stop].float()
        values = table.rows.values[layer][:, span.start : span.stop].float()
        off = (keys - turn(span, rows.keys[layer]).float()).square().sum(dim=(0, 2))
        off += (values - rows.values[layer].float()).square().sum(dim=(0, 2))
        slots += range(span.start, span.stop)
        scores.append(off)
    return _best(slots, scores, share)


def most_attended(mass: Tensor, spans: Sequence[Span], share: float) -> list[int]:
    """Slots of these spans that get most attention. mass [slot]."""
    slots = [slot for span in spans for slot in range(span.start, span.stop)]
    return _best(slots, [mass[span.start : span.stop] for span in spans], share)


def low_rank(rows: KVRows, span: Span, rank: int) -> KVRows:
    """A span's rows with un-rotated keys rebuilt, layer by layer, from their `rank` largest directions."""
    part = KVRows(rows.layout, len(span), rows.device)
    own = [wide(keys[:, span.start : span.stop]) for keys in rows.keys]
    for layer, found in enumerate(factor_all(own, [rank] * len(own))):
        heads, tokens, dim = part.keys[layer].shape
        part.keys[layer].copy_((found.left @ found.right.mT).view(tokens, heads, dim).transpose(0, 1))
        part.values[layer].copy_(rows.values[layer][:, span.start : span.stop])
    return part


def _best(slots: Sequence[int], scores: Sequence[Tensor], share: float) -> list[int]:
    count = round(share * len(slots))
    if not count:
        return []
    return sorted(slots[at] for at in torch.topk(torch.cat(list(scores)), count).indices.tolist())
