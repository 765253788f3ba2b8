"""What is checked before a model is served: everything that would otherwise be silently wrong.

Runs a few tokens through the model's own forward and through ours. From the first it reads what each layer keeps and
how keys turn; with the second it proves that our loop over the layers is the model's forward (embedding scales,
residual multipliers, capped logits and the like would show here). Layer types, masks, attention arguments and rotary
forms that reuse cannot serve are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from looseleaf.errors import UnsupportedModelError
from looseleaf.kv import attention
from looseleaf.kv.attention import Packing, Share
from looseleaf.kv.layout import KVLayout, KVRows, LayerLayout, Plane
from looseleaf.kv.table import SlotTable
from looseleaf.model.decoder import Decoder, Parts, as_phase, find_parts, watch_keys
from looseleaf.model.lane import Entry, Lane
from looseleaf.model.rotary import PairOrder, Phase, RotaryForm, rotate, unrotate

TOKENS = 8
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference between our forward and the model's own, as a share of the largest logit."""


def check_config(config: Any, max_length: int) -> None:
    """Refuse layer types and rotary scalings whose result depends on more than a token and its position."""
    for kind in sorted(set(getattr(config, "layer_types", None) or ())):
        window = getattr(config, "sliding_window", None)
        if kind == "full_attention" or (kind == "sliding_attention" and window is not None and window >= max_length):
            continue
        if kind == "sliding_attention":
            raise UnsupportedModelError(
                f"{config.model_type} has sliding_attention layers with a window of {window} tokens and is asked to "
                f"serve {max_length}; open it with max_length={window} (the window is then full attention)"
            )
        raise UnsupportedModelError(f"{config.model_type} has {kind} layers; only full attention can be reused")
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind in ("dynamic", "longrope"):
        original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if max_length > original:
            raise UnsupportedModelError(
                f"{config.model_type} uses {kind} RoPE, whose frequencies change with the longest position of a batch "
                f"beyond {original} tokens; open it with max_length={original} or less, where they stay fixed"
            )


@torch.inference_mode()
def build_decoder(model: Any) -> Decoder:
    """Probe a loaded model and return its decoder, switched to our attention and proven equal to its own forward."""
    parts = find_parts(model)
    devices = sorted({str(one.device) for one in parts.text.parameters()})
    if len(devices) > 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} is spread over {', '.join(devices)}; its decoder must lie on one device"
        )
    for index, layer in enumerate(parts.layers):
        if not hasattr(layer, "self_attn"):
            raise UnsupportedModelError(
                f"layer {index} of {type(model).__name__} has no self-attention ({type(layer).__name__}); "
                "linear-attention and state-space layers cannot be reused"
            )
    if parts.text.config._attn_implementation == attention.NAME:
        parts.text.set_attn_implementation("sdpa")
    ids = _plain_ids(model, parts)
    cache, raw, handles = DynamicCache(), dict[int, Tensor](), []
    dims = {index: _key_dim(layer.self_attn) for index, layer in enumerate(parts.layers)}
    for index, layer in enumerate(parts.layers):
        handles.append(watch_keys(layer, index, dims[index], raw))
    try:
        expected = model(input_ids=ids[None], past_key_values=cache, use_cache=True).logits[0]
    finally:
        for handle in handles:
            handle.remove()
    layout = _read_layout(parts, cache)
    form, shows_keys = _read_form(parts, layout, cache, raw)
    attention.register()
    parts.text.set_attn_implementation(attention.NAME)
    decoder = Decoder(parts, layout, form, shows_keys=shows_keys)
    _check_masks(decoder, ids)
    _check_forward(decoder, ids, expected, type(model).__name__)
    return decoder


@contextmanager
def stock_attention(decoder: Decoder, implementation: str = "sdpa") -> Iterator[None]:
    """While open, the model runs transformers' own attention: the reference ours is compared with."""
    text: Any = decoder.parts.text
    text.set_attn_implementation(implementation)
    try:
        yield
    finally:
        text.set_attn_implementation(attention.NAME)


def _key_dim(module: Any) -> int:
    """Numbers per key head, as the module that shows keys lays them out."""
    return (
        int(module.qk_rope_head_dim if hasattr(module, "kv_a_proj_with_mqa") else getattr(module, "head_dim", 0)) or 1
    )


def _plain_ids(model: Any, parts: Parts) -> Tensor:
    """A few ordinary tokens, none of them a media placeholder."""
    special = {
        value for name, value in vars(model.config).items() if name.endswith(("token_id", "token_index")) and value
    }
    vocabulary = parts.embedding.weight.shape[0]
    ids = [one for one in range(vocabulary // 3, vocabulary) if one not in special][:TOKENS]
    return torch.tensor(ids, device=parts.embedding.weight.device)


def _read_layout(parts: Parts, cache: DynamicCache) -> KVLayout:
    layers = []
    for layer, kept in zip(parts.layers, cache.layers, strict=True):
        latent = hasattr(layer.self_attn, "kv_a_proj_with_mqa")
        planes = [Plane(heads=one.shape[1], dim=one.shape[3]) for one in (kept.keys, kept.values)]
        keys, values = reversed(planes) if latent else planes
        layers.append(LayerLayout(keys=keys, values=values, latent=latent))
    return KVLayout(layers=tuple(layers), dtype=cache.layers[0].keys.dtype)


def _read_form(parts: Parts, layout: KVLayout, cache: DynamicCache, raw: dict[int, Tensor]) -> tuple[RotaryForm, bool]:
    """How keys turn, found by turning shown keys and comparing bit for bit; and whether modules show them at all."""
    rotary: Any = parts.rotary
    kept = [
        layer.values[0] if one.latent else layer.keys[0] for layer, one in zip(cache.layers, layout.layers, strict=True)
    ]
    device = kept[0].device
    positions = torch.arange(TOKENS, device=device).expand(parts.axes, 1, -1)
    probe = torch.empty(0, dtype=layout.dtype, device=device)
    turns = rotary(probe, position_ids=positions if parts.axes > 1 else positions[0])
    dim = 2 * turns.shape[-1] if isinstance(turns, Tensor) else turns[0].shape[-1]
    phase = as_phase(turns, dim)
    if not isinstance(turns, Tensor) and not all(
        torch.equal(one[..., : dim // 2], one[..., dim // 2 :]) for one in turns
    ):
        raise UnsupportedModelError(f"{type(rotary).__name__} gives the two numbers of a pair different angles")
    for order in PairOrder:
        form = RotaryForm(order=order, dim=dim)
        shown = all(
            index in raw and raw[index].shape == keys.shape and torch.equal(rotate(raw[index], phase, form), keys)
            for index, keys in enumerate(kept)
        )
        if shown:
            return form, True
    return _read_hidden_form(parts, layout, phase, dim), False


def _read_hidden_form(parts: Parts, layout: KVLayout, phase: Phase, dim: int) -> RotaryForm:
    """How keys turn where no module shows them: one token at many positions has one un-rotated key in layer 0."""
    embedding: Any = parts.embedding
    same = embedding.weight.new_tensor([embedding.weight.shape[0] // 2] * TOKENS, dtype=torch.long)
    cache, text = DynamicCache(), parts.text
    text(inputs_embeds=embedding(same)[None], past_key_values=cache, use_cache=True)
    keys = cache.layers[0].values[0] if layout.layers[0].latent else cache.layers[0].keys[0]
    for order in PairOrder:
        form = RotaryForm(order=order, dim=dim)
        back = unrotate(keys, phase, form).float()
        if (back - back[:, :1]).norm() <= TOLERANCE.get(layout.dtype, 1e-4) * back.norm():
            return form
    raise UnsupportedModelError(f"{type(parts.rotary).__name__} turns keys in a way we do not know")


def _fresh_lane(decoder: Decoder, ids: Tensor) -> Lane:
    positions = torch.arange(len(ids), device=ids.device).expand(decoder.parts.axes, -1)
    table = SlotTable(KVRows(decoder.layout, len(ids), ids.device))
    return Lane(
        table=table, positions=positions, entries={0: Entry(slots=list(range(len(ids))), hidden=decoder.embed(ids))}
    )


def _check_masks(decoder: Decoder, ids: Tensor) -> None:
    """Let the text model build its masks through our mask function, which refuses all but plain causal."""
    lane = _fresh_lane(decoder, ids)
    share = Share(table=lane.table, start=0, stop=len(ids), slots=list(range(len(ids))))
    packing = Packing([share], decoder.layout)
    decoder.parts.text(
        inputs_embeds=lane.entries[0].hidden[None], past_key_values=packing, use_cache=True, looseleaf=packing
    )


def _check_forward(decoder: Decoder, ids: Tensor, expected: Tensor, name: str) -> None:
    (hidden,) = decoder.run([_fresh_lane(decoder, ids)])
    got = decoder.logits(hidden)
    error = ((got - expected).abs().max() / expected.abs().max()).item()
    allowed = TOLERANCE.get(expected.dtype, 1e-4)
    if not error <= allowed:
        raise UnsupportedModelError(
            f"our pass through the layers of {name} differs from its own forward by {error:.1e} of the largest logit "
            f"(allowed {allowed:.0e}): something around the layers is not handled yet; see docs/add-a-model.md"
        )
