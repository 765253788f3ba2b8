"""The text decoder of a transformers model, run layer by layer over packed lanes.

Takes lanes (rows with hidden states, positions, a table) and returns the hidden states of the rows that reach the top.
It finds the parts every decoder has (embedding, layers, norm, rotary, head) and calls them as the model itself does;
`model/probe.py` checks at loading that this equals the model's own forward. Knows nothing of images, prompts, policies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from looseleaf.errors import UnsupportedModelError
from looseleaf.kv.attention import Packing, Share
from looseleaf.kv.layout import KVLayout
from looseleaf.model.lane import Lane
from looseleaf.model.rotary import Phase, RotaryForm, unrotate


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Where a transformers model keeps what a decoder is made of."""

    text: Any
    layers: Any
    norm: Any
    rotary: Any
    embedding: Any
    head: Any
    axes: int


def find_parts(model: Any) -> Parts:
    """The decoder's parts in any causal or image-text model of transformers."""
    text = model.get_decoder()
    found = {name: getattr(text, name, None) for name in ("layers", "norm", "rotary_emb")}
    missing = [name for name, part in found.items() if part is None]
    head = model.get_output_embeddings()
    if missing or head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no {', '.join(missing) or 'output head'} where decoders keep it; "
            "see docs/add-a-model.md"
        )
    rope = getattr(text.config, "rope_parameters", None) or {}
    return Parts(
        text=text, layers=found["layers"], norm=found["norm"], rotary=found["rotary_emb"],
        embedding=model.get_input_embeddings(), head=head, axes=3 if "mrope_section" in rope else 1,
    )  # fmt: skip


class Decoder:
    """Runs lanes through the layers. Rows of all lanes are packed into one [1, T, width]."""

    def __init__(self, parts: Parts, layout: KVLayout, form: RotaryForm, *, shows_keys: bool):
        self.parts = parts
        self.layout = layout
        self.form = form
        self.shows_keys = shows_keys
        self.device = next(parts.embedding.parameters()).device

    def phase(self, positions: Tensor) -> Phase:
        """Cosines and sines of these positions [axis, token] from the model's own rotary module."""
        return as_phase(self._turns(positions), self.form.dim)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [token, width] of text tokens."""
        return self.parts.embedding(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token scores [row, vocabulary] of rows [row, width] that left the last layer."""
        return self.parts.head(self.parts.norm(hidden))

    def run(self, lanes: Sequence[Lane]) -> list[Tensor]:
        """Compute every lane's rows; returns, per lane, the hidden states [row, width] behind the last layer."""
        pack = _Pack(self, lanes)
        with self._raw_keys(any(lane.capture and lane.capture.rows for lane in lanes)) as raw:
            for index, layer in enumerate(self.parts.layers):
                if index in pack.boundaries:
                    pack.change_rows(index)
                for lane in lanes:
                    if lane.link is not None:
                        lane.link(index)
                if pack.hidden.shape[1]:
                    out = layer(
                        pack.hidden, attention_mask=None, position_embeddings=pack.turns, position_ids=None,
                        past_key_values=pack.packing, use_cache=True, looseleaf=pack.packing,
                    )  # fmt: skip
                    pack.hidden = out[0] if isinstance(out, tuple) else out
                    self._capture(index, raw, pack)
                    pack.add_deep(index)
        return [pack.hidden[0, share.start : share.stop] for share in pack.shares]

    def _turns(self, positions: Tensor) -> Any:
        """What the model's layers take as position embeddings for these positions [axis, token]."""
        ids = positions[:, None] if self.parts.axes > 1 else positions[:1]
        dtype = self.layout.dtype
        return self.parts.rotary(torch.empty(0, dtype=dtype, device=self.device), position_ids=ids.to(self.device))

    def _capture(self, layer: int, raw: dict[int, Tensor], pack: _Pack) -> None:
        """Write captured rows down: keys as the module showed them, else turned back."""
        packing = pack.packing
        if not any(share.capture and share.capture.rows for share in packing.shares):
            return
        if self.shows_keys:
            packing.capture_keys(layer, raw.pop(layer))
        else:
            keys = torch.cat([share.table.rows.keys[layer][:, share.index] for share in packing.shares], dim=1)
            packing.capture_keys(layer, unrotate(keys, as_phase(pack.turns, self.form.dim), self.form))
        packing.capture_values(layer)

    @contextmanager
    def _raw_keys(self, wanted: bool) -> Iterator[dict[int, Tensor]]:
        """While open, un-rotated keys [head, row, dim] of each layer appear here as the layer computes them."""
        raw: dict[int, Tensor] = {}
        handles = []
        if wanted and self.shows_keys:
            for index, layer in enumerate(self.parts.layers):
                handles.append(watch_keys(layer, index, self.layout.layers[index].keys.dim, raw))
        try:
            yield raw
        finally:
            for handle in handles:
                handle.remove()


class _Pack:
    """The rows of all lanes while they climb: one hidden tensor, one packing, rebuilt only when row sets change."""

    def __init__(self, decoder: Decoder, lanes: Sequence[Lane]):
        self.decoder = decoder
        self.lanes = lanes
        self.boundaries = {0}.union(*({*lane.entries, *lane.stay, *lane.states} for lane in lanes))
        self.slots: list[list[int]] = [[] for _ in lanes]
        self.shares: list[Share] = []
        self.hidden = torch.empty(0)
        self.turns: Any = None
        self.packing = Packing([], decoder.layout)
        self._deep: tuple[Tensor, list[Tensor]] | None = None

    def change_rows(self, layer: int) -> None:
        """Let rows leave and enter in front of `layer`, and write down boundary states that were asked for."""
        changed = layer == 0
        parts: list[Tensor] = []
        for number, lane in enumerate(self.lanes):
            before = self.slots[number]
            hidden = self.hidden[0, self.shares[number].start : self.shares[number].stop] if self.shares else None
            slots = before
            if layer in lane.stay:
                slots = lane.stay[layer](before)
                if hidden is not None:
                    kept = set(slots)
                    rows = [row for row, slot in enumerate(before) if slot in kept]
                    hidden = hidden[torch.tensor(rows, dtype=torch.long, device=hidden.device)]
            if layer in lane.entries:
                slots, hidden = _merge(slots, hidden, lane.entries[layer].slots, lane.entries[layer].hidden)
            assert hidden is not None, "a lane without rows in front of layer 0"
            if layer in lane.states:
                lane.states[layer] = hidden.clone()
            changed = changed or slots is not before
            self.slots[number] = slots
            parts.append(hidden)
        if changed:
            self._rebuild(parts)

    def _rebuild(self, parts: list[Tensor]) -> None:
        self.hidden = (parts[0] if len(parts) == 1 else torch.cat(parts))[None]
        self.shares, start, positions = [], 0, []
        for lane, slots in zip(self.lanes, self.slots, strict=True):
            share = Share(
                table=lane.table, start=start, stop=start + len(slots), slots=slots, capture=lane.capture,
                decodes=lane.decodes,
            )  # fmt: skip
            positions.append(lane.positions[:, share.index])
            self.shares.append(share)
            start = share.stop
        self.turns = self.decoder._turns(torch.cat(positions, dim=1))
        self.packing = Packing([share for share in self.shares if share.slots], self.decoder.layout)
        self._deep = self._find_deep()

    def _find_deep(self) -> tuple[Tensor, list[Tensor]] | None:
        """Rows of the pack that get deepstack features, and those features layer by layer."""
        rows: list[int] = []
        features: list[list[Tensor]] = []
        for lane, share in zip(self.lanes, self.shares, strict=True):
            if lane.deep is None or not share.slots:
                continue
            where = {slot: row for row, slot in enumerate(lane.deep.slots)}
            hits = [(share.start + row, where[slot]) for row, slot in enumerate(share.slots) if slot in where]
            rows += [row for row, _ in hits]
            picked = torch.tensor([feature for _, feature in hits], dtype=torch.long, device=self.decoder.device)
            features.append([one[picked] for one in lane.deep.features])
        if not rows:
            return None
        return torch.tensor(rows, device=self.decoder.device), [torch.cat(one) for one in zip(*features, strict=True)]

    def add_deep(self, layer: int) -> None:
        """Add the deepstack features that belong behind `layer`."""
        if self._deep is not None and layer < len(self._deep[1]):
            rows, features = self._deep
            self.hidden[0].index_add_(0, rows, features[layer].to(self.hidden.dtype))


def _merge(slots: list[int], hidden: Tensor | None, more: list[int], entering: Tensor) -> tuple[list[int], Tensor]:
    """Rows of two ascending slot lists as one, hidden states along."""
    if hidden is None or not slots:
        return more, entering
    order = sorted(range(len(slots) + len(more)), key=(slots + more).__getitem__)
    joined = torch.cat((hidden, entering))[torch.tensor(order, device=hidden.device)]
    return [(slots + more)[one] for one in order], joined


def as_phase(turns: Any, dim: int) -> Phase:
    """A rotary module's answer as a phase: (cos, sin) [1, token, dim] with two equal halves, or complex pairs."""
    if isinstance(turns, Tensor):
        return Phase(cos=turns[0].real, sin=turns[0].imag)
    cos, sin = turns
    return Phase(cos=cos[0, :, : dim // 2], sin=sin[0, :, : dim // 2])


def watch_keys(layer: nn.Module, index: int, dim: int, raw: dict[int, Tensor]) -> Any:
    """Hook the last module a key passes before the rotary; its keys [head, row, dim] land in raw[index]."""
    attention: Any = layer.self_attn
    source = attention.k_norm if hasattr(attention, "k_norm") else getattr(attention, "k_proj", None)
    source = getattr(attention, "kv_a_proj_with_mqa", None) if source is None else source
    if source is None:
        return _Nothing()

    def keep(_: nn.Module, __: Any, output: Tensor) -> None:
        rows = output.reshape(output.shape[1], -1)
        if hasattr(attention, "kv_a_proj_with_mqa"):
            rows = rows[:, -dim:]
        raw[index] = rows.view(rows.shape[0], -1, dim).transpose(0, 1)

    return source.register_forward_hook(keep)


class _Nothing:
    """A hook handle for layers that show no key."""

    def remove(self) -> None:
        """Nothing to undo."""
