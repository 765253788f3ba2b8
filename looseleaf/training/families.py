"""A model being trained: its stock modules in the order a batch goes through them.

In: a folder `recipes.build_folder` wrote, or one saved from here. A batch then goes `prompt_ids` → `embed`, `features`
→ `fill` → `hidden` → `logits`, everything on the device and without asking it for a value. Out: a folder with bf16
weights that plain `from_pretrained` loads. What this file does not know: data, losses, optimisers, and which tokens may
see which, which comes in as a mask.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask
from transformers import AutoModelForImageTextToText

from looseleaf.errors import PromptError
from looseleaf.model.family import family_of
from looseleaf.model.processors import load_processor
from looseleaf.training import attention
from looseleaf.training.vision import Features, tower_of

LONGEST = 10.0
"""Root mean square length of a head's queries, and of its keys, at most; heads are 64 wide, so scores stay about 12.

Nothing bounds them in models without a norm on queries and keys, and Muon's long steps let them grow without end: in
two trainings that never learned some of the skills, scores came to 240 and many heads saw one token and nothing else,
which no slope moves again. With a norm (Qwen3-VL) they end at 10. Kimi K2 was trained with a clip for this reason."""
OF_ANY_SIZE = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention for a number of pictures that changes from batch to batch: cuDNN plans anew for every number."""


class Trainee:
    """A loaded model, its vision tower batched and its text attention switched to one that takes any mask."""

    def __init__(self, model: Any, processor: Any, folder: Path):
        self.model = model
        self.processor = processor
        self.tokenizer: Any = processor.tokenizer
        self.folder = folder
        self.tower = tower_of(model, processor)
        self.text: Any = model.base_model.language_model
        if hasattr(self.text, "_deepstack_process"):
            self.text._deepstack_process = _add_at
        self._unbounded = [layer.self_attn for layer in self.text.layers if _is_unbounded(layer.self_attn)]
        for one in self._unbounded:
            heads = sum(len(weight) // one.head_dim for weight in (one.q_proj.weight, one.k_proj.weight))
            one.register_buffer("lengths", torch.zeros(heads, device=one.q_proj.weight.device), persistent=False)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        text_attention: str = attention.TEXT,
    ) -> Trainee:
        """Load the model in `folder`. `text_attention` is ours or one of transformers' (`sdpa`)."""
        attention.register()
        loaded: Any = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
        trainee = cls(loaded.to(device), load_processor(folder), folder)
        trainee.text.set_attn_implementation(text_attention)
        return trainee

    @property
    def blocks(self) -> list[nn.Module]:
        """Every vision block and decoder layer: each may be compiled in place by its own `compile()`."""
        return [*self.tower.blocks, *self.text.layers]

    @property
    def axes(self) -> int:
        """Position axes: 3 where the text model takes M-RoPE positions, else 1."""
        return 3 if "mrope_section" in self.text.config.rope_parameters else 1

    @property
    def image_text(self) -> tuple[str, str]:
        """What the chat template writes before and after an image's pad tokens."""
        return family_of(self.model.config.model_type).wrap

    @property
    def pad_id(self) -> int:
        """The token that stands for one visual row."""
        return int(self.model.config.image_token_id)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens an image of this many pixels has. Refuses sizes the processor would change."""
        return self.tower.grid(height, width)

    def prompt_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        sizes: Sequence[tuple[int, int]] = (),
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
    ) -> list[int]:
        """Token ids of a chat whose images have `sizes` (height, width) in the order they stand, as the processor's.

        Messages are transformers' (`{"type": "image"}` and `{"type": "text", "text": …}` parts); `answer` opens the
        assistant's turn at the end.
        """
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=tools and list(tools), add_generation_prompt=answer, tokenize=False
        )
        once = self.tokenizer(text)["input_ids"]
        if once.count(self.pad_id) != len(sizes):
            raise PromptError(f"the chat shows {once.count(self.pad_id)} images, but {len(sizes)} sizes were given")
        waiting = iter(sizes)
        ids: list[int] = []
        for one in once:
            rows, columns = self.grid(*next(waiting)) if one == self.pad_id else (1, 1)
            ids += [one] * (rows * columns)
        return ids

    def features(self, images: Tensor) -> Features:
        """Visual rows of images [image, 3, height, width] in 0..1, all of one size: [image, token, width] each."""
        with sdpa_kernel(OF_ANY_SIZE):
            return self.tower(images)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [batch, token, width] of ids [batch, token]."""
        return self.model.get_input_embeddings()(ids)

    def fill(self, embeds: Tensor, image_slots: Tensor, rows: Tensor) -> Tensor:
        """`embeds` [batch, token, width] with `rows` [row, width] where `image_slots` [batch, token] is true, in order.

        There must be as many rows as slots; nobody counts, as that would wait for the device.
        """
        where = _where(image_slots, len(rows))
        return embeds.flatten(0, 1).index_copy(0, where, rows.to(embeds.dtype)).view_as(embeds)

    def hidden(
        self,
        embeds: Tensor,
        positions: Tensor,
        mask: Tensor | BlockMask,
        image_slots: Tensor | None = None,
        deep: Sequence[Tensor] = (),
    ) -> Tensor:
        """The text model's last hidden states [batch, token, width], behind its final norm.

        embeds [batch, token, width]; positions [axis, batch, token]; mask [batch, 1, token, token], true where seen,
        or its blocks; image_slots [batch, token], true where visual rows stand; deep, deepstack's rows [row, width] in
        the slots' order, one tensor for each of the first layers.
        """
        extra: dict[str, Any] = {}
        if deep:
            assert image_slots is not None, "deepstack rows need their slots"
            extra = {
                "visual_pos_masks": _where(image_slots, len(deep[0])),
                "deepstack_visual_embeds": list(deep),
            }
        out = self.text(
            inputs_embeds=embeds,
            position_ids=positions if self.axes > 1 else positions[0],
            attention_mask=mask,
            use_cache=False,
            **extra,
        )
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocabulary] of hidden states [..., width]."""
        return self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def shorten(self) -> None:
        """Make the projections of heads smaller whose queries or keys were too long in the last pass."""
        for one in self._unbounded:
            factors = (LONGEST / one.lengths).clamp(max=1)
            heads = len(one.q_proj.weight) // one.head_dim
            for projection, own in ((one.q_proj, factors[:heads]), (one.k_proj, factors[heads:])):
                by_row = own.repeat_interleave(one.head_dim)
                projection.weight.mul_(by_row[:, None])
                if projection.bias is not None:
                    projection.bias.mul_(by_row)

    def save(self, folder: Path) -> Path:
        """Write the model in bf16, with the tokenizer and processor files it was loaded with."""
        folder.mkdir(parents=True, exist_ok=True)
        with torch.no_grad():
            copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(folder)
        for file in sorted(self.folder.iterdir()):
            written = file.name in ("config.json", "generation_config.json") or ".safetensors" in file.name
            if not written and folder.resolve() != self.folder.resolve():
                shutil.copyfile(file, folder / file.name)
        return folder


def _is_unbounded(attention: Any) -> bool:
    """Whether queries and keys are projections and nothing else."""
    return hasattr(attention, "q_proj") and hasattr(attention, "k_proj") and not hasattr(attention, "q_norm")


def _where(slots: Tensor, count: int) -> Tensor:
    """Indexes [row] of the first `count` true slots in the flattened [batch, token]; the device is not waited for."""
    return torch.nonzero_static(slots.flatten(), size=count)[:, 0]


def _add_at(hidden: Tensor, where: Tensor, rows: Tensor) -> Tensor:
    """`hidden` [batch, token, width] with `rows` [row, width] added at `where` [row] of the flattened tokens.

    Stands in for Qwen3-VL's own, which indexes by a truth mask and so waits for the device in every layer.
    """
    return hidden.flatten(0, 1).index_add(0, where, rows.to(hidden.dtype)).view_as(hidden)
