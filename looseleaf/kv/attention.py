"""Attention over the rows of several sequences packed into one [1, T] pass.

Registers one attention function, one mask function and one cache with transformers; the only code that touches those
interfaces. A `Packing` says which of the T rows belong to which sequence, in which slots, and what they may see; it
travels to the attention function as a keyword of the decoder layer, never through a global. Everything the function
decides is decided from host-side facts of the packing: no tensor is read back.

What is not plain causal attention is refused by name: masks, soft-capping, sinks, windows shorter than what is served.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import causal_mask_function

from looseleaf.errors import UnsupportedModelError
from looseleaf.kv.layout import KVLayout, KVRows
from looseleaf.kv.table import SlotTable

NAME = "looseleaf"

ABSORB_BELOW = 0.25
"""MLA attends in the latent space when the rows are fewer than this share of what they see, else expands keys once."""


@dataclass(kw_only=True)
class Share:
    """One sequence's rows in a pass: rows `start:stop` of the pack, computed for `slots` of `table` (ascending)."""

    table: SlotTable
    start: int
    stop: int
    slots: list[int]
    capture: Capture | None = None
    decodes: bool = False
    """One row at the end of what its sequence holds: slots behind it are nobody's yet."""
    visible: int = field(init=False)
    contiguous: bool = field(init=False)
    index: slice | Tensor = field(init=False)
    mask: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        first, last = (self.slots[0], self.slots[-1]) if self.slots else (0, -1)
        self.visible = last + 1
        self.contiguous = last - first + 1 == len(self.slots)
        device = self.table.rows.device
        self.index = slice(first, last + 1) if self.contiguous else torch.tensor(self.slots, device=device)
        if len(self.slots) > 1 and not self.whole:
            self.mask = self._additive_mask(device)

    @property
    def whole(self) -> bool:
        """Whether the rows are a sequence from its first slot on, without a gap: plain causal attention."""
        return self.visible == len(self.slots)

    def _additive_mask(self, device: torch.device) -> Tensor:
        """[row, slot]: 0 where a row sees a slot, -inf where the slot lies behind it."""
        rows = torch.tensor(self.slots, device=device)
        hidden = torch.arange(self.visible, device=device)[None, :] > rows[:, None]
        dtype = self.table.rows.layout.dtype
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


@dataclass(kw_only=True)
class Capture:
    """What a share writes down on its way: un-rotated keys and values of its slots `first:first + rows.tokens`."""

    rows: KVRows | None = None
    first: int = 0
    mass_from: int | None = None
    """With a number: add up the attention that rows from this slot on pay to every slot, over heads and layers."""
    mass: Tensor | None = None


class SeatBatch:
    """Sequences of one slab that decode one row each: written and attended together.

    Seats between the first and the last that do not decode are computed along and thrown away.
    """

    def __init__(self, shares: Sequence[Share]):
        placed = sorted(
            ((share.table.seat, share) for share in shares if share.table.seat), key=lambda one: one[0].number
        )
        shares = [share for _, share in placed]
        self.slab = placed[0][0].slab
        numbers = [seat.number for seat, _ in placed]
        device = self.slab.keys[0].device
        self.first, self.last = numbers[0], numbers[-1] + 1
        self.dense = len(numbers) == self.last - self.first
        self.rows = torch.tensor([share.start for share in shares], device=device)
        self.seats = torch.tensor(numbers, device=device)
        self.slots = torch.tensor([share.slots[0] for share in shares], device=device)
        self.visible = max(share.visible for share in shares)
        for share in shares:
            if share.visible < self.visible:
                share.table.clear(share.visible, self.visible)
        limits = torch.zeros(self.last - self.first, dtype=torch.long, device=device)
        limits[self.seats - self.first] = self.slots
        hidden = torch.arange(self.visible, device=device) > limits[:, None]
        mask = torch.zeros(hidden.shape, dtype=self.slab.layout.dtype, device=device)
        self.mask = mask.masked_fill_(hidden, -math.inf)[:, None, None]

    @staticmethod
    def pays(shares: Sequence[Share]) -> bool:
        """Whether padding every sequence to the longest wastes less than it saves."""
        longest = max(share.visible for share in shares)
        return len(shares) > 1 and 2 * sum(share.visible for share in shares) >= len(shares) * longest

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Put each sequence's row into its slot. keys, values [head, row, dim] of the whole pack."""
        self.slab.keys[layer][self.seats, :, self.slots] = keys[:, self.rows].transpose(0, 1)
        self.slab.values[layer][self.seats, :, self.slots] = values[:, self.rows].transpose(0, 1)

    def attend(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Query [1, head, T, dim] of the whole pack → [row, head, dim] of these sequences' rows."""
        seats = slice(self.first, self.last)
        keys = self.slab.keys[layer][seats, :, : self.visible]
        values = self.slab.values[layer][seats, :, : self.visible]
        heads, dim = query.shape[1], query.shape[3]
        asking = query[0].transpose(0, 1)[self.rows]
        if not self.dense:
            asking = query.new_zeros(self.last - self.first, heads, dim).index_copy_(0, self.seats - self.first, asking)
        folded = asking.view(len(asking), keys.shape[1], heads // keys.shape[1], dim)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask, scale=scaling)
        out = out.reshape(len(asking), heads, -1)
        return out if self.dense else out[self.seats - self.first]


class Packing(Cache):
    """A batch's description and the cache transformers writes into: `update` stores rows, attention reads tables."""

    def __init__(self, shares: Sequence[Share], layout: KVLayout):
        super().__init__(layers=[])
        self.shares = shares
        self.layout = layout
        self.batches: list[SeatBatch] = []
        self.singles: Sequence[Share] = shares
        if sum(share.decodes for share in shares) > 1 and not any(layer.latent for layer in layout.layers):
            self._group()

    def _group(self) -> None:
        """Let decoding sequences of one slab go together."""
        slabs: dict[int, list[Share]] = {}
        for share in self.shares:
            if share.decodes and share.table.seat is not None:
                slabs.setdefault(id(share.table.seat.slab), []).append(share)
        together = [group for group in slabs.values() if SeatBatch.pays(group)]
        self.batches = [SeatBatch(group) for group in together]
        grouped = {id(share) for group in together for share in group}
        self.singles = [share for share in self.shares if id(share) not in grouped]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the rows being computed into their slots; hands back what it was given, which attention ignores."""
        keys, values = key_states, value_states
        if self.layout.layers[layer_idx].latent:  # MLA calls update(latent, rope band)
            keys, values = value_states, key_states
        for share in self.singles:
            rows = slice(share.start, share.stop)
            share.table.write(layer_idx, share.index, keys[0, :, rows], values[0, :, rows])
        for batch in self.batches:
            batch.write(layer_idx, keys[0], values[0])
        return key_states, value_states

    def capture_keys(self, layer: int, keys: Tensor) -> None:
        """Keep the un-rotated keys [head, row, dim] of captured slots."""
        for share in self.shares:
            if share.capture is not None and share.capture.rows is not None:
                assert share.contiguous, "rows are captured from whole runs of slots"
                wanted = share.capture.rows.keys[layer]
                start = share.start + share.capture.first - share.slots[0]
                wanted.copy_(keys[:, start : start + wanted.shape[1]])

    def capture_values(self, layer: int) -> None:
        """Keep the values of captured slots, once `layer` has written them."""
        for share in self.shares:
            if share.capture is not None and share.capture.rows is not None:
                wanted = share.capture.rows.values[layer]
                first = share.capture.first
                wanted.copy_(share.table.rows.values[layer][:, first : first + wanted.shape[1]])

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given: a decoder that asks for a length would guess them."""
        return 0


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    looseleaf: Packing | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: every share's rows against what its sequence holds. query [1, head, T, dim]."""
    del key, value, dropout, attention_mask
    if looseleaf is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} did not hand our batch description on to its attention function; "
            "this architecture needs an adapter that does (docs/add-a-model.md)"
        )
    _refuse_unknown(module, others, looseleaf)
    layer: int = module.layer_idx  # type: ignore[assignment]
    one = _attend_latent if looseleaf.layout.layers[layer].latent else _attend_rows
    if len(looseleaf.shares) == 1:
        return one(module, looseleaf.shares[0], layer, query, scaling).transpose(1, 2), None
    out: Tensor | None = None
    for batch in looseleaf.batches:
        part = batch.attend(layer, query, scaling)
        out = part.new_empty(1, query.shape[2], *part.shape[1:]) if out is None else out
        out[0, batch.rows] = part
    for share in looseleaf.singles:
        part = one(module, share, layer, query[:, :, share.start : share.stop], scaling)
        out = part.new_empty(1, query.shape[2], part.shape[1], part.shape[3]) if out is None else out
        out[:, share.start : share.stop] = part.transpose(1, 2)
    assert out is not None, "a pass without rows"
    return out, None


def _attend_rows(module: nn.Module, share: Share, layer: int, query: Tensor, scaling: float) -> Tensor:
    """MHA and GQA. query [1, head, row, dim]; returns the same shape."""
    keys, values = share.table.read(layer, share.visible)
    if share.capture is not None and share.capture.mass_from is not None:
        _add_mass(share, query, keys, scaling)
    heads, rows, dim = query.shape[1:]
    groups = heads // keys.shape[0]
    if rows == 1:  # decoding: the heads of a group are rows that see the same keys, nothing is masked
        folded = query.view(1, keys.shape[0], groups, dim)
        out = scaled_dot_product_attention(folded, keys[None], values[None], scale=scaling)
        return out.reshape(1, heads, 1, -1)
    if query.is_cuda and share.mask is not None and groups > 1:  # no fused CUDA kernel takes a mask and groups
        keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
        groups = 1
    return scaled_dot_product_attention(
        query, keys[None], values[None], attn_mask=share.mask, is_causal=share.mask is None, scale=scaling,
        enable_gqa=groups > 1,
    )  # fmt: skip


def _attend_latent(module: Any, share: Share, layer: int, query: Tensor, scaling: float) -> Tensor:
    """MLA. query [1, head, row, nope + rope]; returns [1, head, row, v]."""
    band, latent = (plane[0] for plane in share.table.read(layer, share.visible))
    heads, rows, nope = query.shape[1], query.shape[2], module.qk_nope_head_dim
    weight = module.kv_b_proj.weight.view(heads, nope + module.v_head_dim, latent.shape[-1])
    if rows < ABSORB_BELOW * share.visible and share.capture is None:
        inner = torch.cat((query[0, :, :, :nope] @ weight[:, :nope], query[0, :, :, nope:]), dim=-1)
        scores = (inner @ torch.cat((latent, band), dim=-1).T) * scaling
        if share.mask is not None:
            scores = scores + share.mask
        mixed = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype) @ latent
        return (mixed @ weight[:, nope:].transpose(1, 2))[None]
    expanded = linear(latent, module.kv_b_proj.weight).view(share.visible, heads, -1).transpose(0, 1)
    keys = torch.cat((expanded[..., :nope], band.expand(heads, -1, -1)), dim=-1)
    if share.capture is not None and share.capture.mass_from is not None:
        _add_mass(share, query, keys, scaling)
    return scaled_dot_product_attention(
        query, keys[None], expanded[None, ..., nope:], attn_mask=share.mask,
        is_causal=share.mask is None and rows > 1, scale=scaling,
    )  # fmt: skip


def _add_mass(share: Share, query: Tensor, keys: Tensor, scaling: float) -> None:
    """Add the attention that the rows from `mass_from` on pay to each slot. keys [kv head, slot, dim]."""
    assert share.capture is not None
    assert share.capture.mass_from is not None
    first = next(row for row, slot in enumerate(share.slots) if slot >= share.capture.mass_from)
    asking = query[0, :, first:].float()
    scores = asking @ keys.float().repeat_interleave(asking.shape[0] // keys.shape[0], 0).transpose(1, 2) * scaling
    slots = torch.tensor(share.slots[first:], device=scores.device)
    scores.masked_fill_(torch.arange(share.visible, device=scores.device) > slots[:, None], -math.inf)
    mass = torch.softmax(scores, dim=-1).sum(dim=(0, 1))
    share.capture.mass = mass if share.capture.mass is None else share.capture.mass + mass


HARMLESS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "output_router_logits"})


def _refuse_unknown(module: nn.Module, others: dict[str, Any], packing: Packing) -> None:
    """Stop at any argument that would change attention and that we do not implement."""
    for name, value in others.items():
        if value is None or value is False or name in HARMLESS:
            continue
        if name == "sliding_window":
            longest = max(share.visible for share in packing.shares)
            if value >= longest:
                continue
            raise UnsupportedModelError(
                f"{type(module).__name__} attends through a sliding window of {value} tokens and the sequence has "
                f"{longest}; open the model with max_length={value} or less"
            )
        raise UnsupportedModelError(
            f"{type(module).__name__} asks attention for {name}={value!r}, which we do not have"
        )


def refuse_other_masks(
    *, mask_function: Callable[..., Any] = causal_mask_function, attention_mask: Tensor | None = None, **_: Any
) -> None:
    """Transformers' mask function: builds nothing (packings describe what rows see), refuses all but plain causal."""
    if mask_function is not causal_mask_function:
        name = getattr(mask_function, "__qualname__", repr(mask_function))
        raise UnsupportedModelError(
            f"the model builds its attention mask with {name}; only plain causal masks can be served "
            "(image blocks that see each other would be silently wrong)"
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise UnsupportedModelError("the model was given a padding mask; rows are packed, never padded")


def register() -> None:
    """Make the attention and mask functions known to transformers under our name; harmless to repeat."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, refuse_other_masks)
