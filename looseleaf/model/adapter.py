"""One transformers model as the rest of looseleaf sees it.

Holds the decoder, the vision call, the position rule, the processor and the model's identity. It knows models, not
prompts: ids, pixels and positions come in and go out as tensors.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from looseleaf.errors import ModelError
from looseleaf.identity import digest
from looseleaf.kv.layout import KVLayout
from looseleaf.kv.records import Features
from looseleaf.model.decoder import Decoder
from looseleaf.model.family import Family

ADAPTER_VERSION = 1
"""Part of a model's fingerprint: raise it when a change here makes stored records wrong."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a run of tokens stands when it starts at 0: positions [axis, token], and where the next run starts."""

    positions: Tensor
    advance: int

    @property
    def reach(self) -> int:
        """The highest position in the run."""
        return int(self.positions.max())


class Adapter:
    """A loaded model, its decoder switched to our attention."""

    def __init__(self, model: Any, processor: Any, decoder: Decoder, family: Family, *, name: str, max_length: int):
        self.model = model
        self.processor = processor
        self.tokenizer: Any = getattr(processor, "tokenizer", processor)
        self.decoder = decoder
        self.family = family
        self.name = name
        self.max_length = max_length

    @property
    def layout(self) -> KVLayout:
        """What every layer keeps."""
        return self.decoder.layout

    @property
    def axes(self) -> int:
        """Position axes: 3 for M-RoPE, else 1."""
        return self.decoder.parts.axes

    @property
    def device(self) -> torch.device:
        """Where rows are computed."""
        return self.decoder.device

    @cached_property
    def sees_images(self) -> bool:
        """Whether the model has a vision tower and a processor for it."""
        return hasattr(self._vision_owner, "get_image_features") and hasattr(self.processor, "image_processor")

    @property
    def _vision_owner(self) -> Any:
        """The module with the vision calls: the model, or the one inside it that has no head."""
        return self.model if hasattr(self.model, "get_image_features") else self.model.base_model

    @cached_property
    def image_token_id(self) -> int | None:
        """The id that stands for one visual row."""
        return getattr(self.processor, "image_token_id", None) if self.sees_images else None

    @cached_property
    def video_token_id(self) -> int | None:
        """The id that stands for one visual row of a clip."""
        return getattr(self.processor, "video_token_id", None) if self.sees_images else None

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        config = self.model.generation_config
        eos = config.eos_token_id if config.eos_token_id is not None else self.tokenizer.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or ())

    @torch.inference_mode()
    def see(self, inputs: Mapping[str, Tensor]) -> Features:
        """Run the vision tower on one chunk's inputs."""
        clip = "pixel_values_videos" in inputs
        owner = self._vision_owner
        call = owner.get_video_features if clip else owner.get_image_features
        takes = inspect.signature(call).parameters
        out = call(**self.moved({name: value for name, value in inputs.items() if name in takes}), return_dict=True)
        deep = tuple(_rows(one).to(self.layout.dtype) for one in getattr(out, "deepstack_features", None) or ())
        return Features(embeddings=_rows(out.pooler_output).to(self.layout.dtype), deep=deep)

    def moved(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Processor outputs on the model's device; pixels in its dtype (some vision towers do not cast)."""
        dtype = self.model.dtype
        return {
            name: value.to(self.device, dtype) if value.is_floating_point() else value.to(self.device)
            for name, value in inputs.items()
        }

    def place(self, ids: Tensor, inputs: Mapping[str, Tensor] | None = None) -> Placement:
        """Positions of a run of tokens by the model's own rule, and where the next token would stand. ids [token]."""
        if self.axes == 1 or not inputs:
            steps = torch.arange(len(ids)).expand(self.axes, -1)
            return Placement(positions=steps, advance=len(ids))
        followed = torch.cat((ids, ids.new_tensor([self._plain_id])))[None]
        kinds = torch.zeros_like(followed, dtype=torch.int)
        for kind, marker in ((1, self.image_token_id), (2, self.video_token_id)):
            if marker is not None:
                kinds[followed == marker] = kind
        base = self.model.base_model
        takes = inspect.signature(base.get_rope_index).parameters
        given = {name: value for name, value in inputs.items() if name in takes}
        positions, _ = base.get_rope_index(input_ids=followed, mm_token_type_ids=kinds, **given)
        return Placement(positions=positions[:, 0, :-1], advance=int(positions[0, 0, -1]))

    @cached_property
    def _plain_id(self) -> int:
        taken = {self.image_token_id, self.video_token_id}
        return next(one for one in range(len(taken) + 1) if one not in taken)

    @cached_property
    def fingerprint(self) -> str:
        """Identity of config, weights, dtype and adapter: another model's records are never mistaken for this one's."""
        config = json.loads(self.model.config.to_json_string(use_diff=False))
        for noise in ("_name_or_path", "transformers_version"):
            config.pop(noise, None)
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter
            state = self.model.state_dict()
            weights = dict(zip(state, pool.map(_hash_tensor, state.values()), strict=True))
        return digest(
            "model", adapter=ADAPTER_VERSION, config=json.dumps(config, sort_keys=True), weights=weights,
            layout=self.layout.describe(),
        )  # fmt: skip


def _rows(features: Any) -> Tensor:
    """Visual rows [row, width] from what vision calls return: a tensor [..., width] or a list of them."""
    parts = list(features) if isinstance(features, list | tuple) else [features]
    if not parts or not all(isinstance(one, Tensor) for one in parts):
        raise ModelError(f"the vision tower returned {type(features).__name__}, expected visual rows")
    return torch.cat([one.reshape(-1, one.shape[-1]) for one in parts])


def _hash_tensor(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().view(-1)
    sha = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    sha.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return sha.hexdigest()
