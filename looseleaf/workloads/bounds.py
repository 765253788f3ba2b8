"""How large and how many pictures each embedded model was trained on, and those kept for measuring it."""

from __future__ import annotations

from dataclasses import dataclass

from looseleaf.workloads.questions import Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Sizes in pixels (height, width) and numbers of pictures of one model's prompts."""

    sizes: tuple[Size, ...]
    counts: tuple[int, ...]
    """Pictures of an album."""
    frame_side: int
    clip_frames: tuple[int, ...]
    stream_frames: tuple[int, ...] = ()
    """None where the model was not trained on streams."""
    note: Size = (56, 112)
    """Of a note of a line or two."""
    first_sizes: tuple[Size, ...] = ()
    first_side: int | None = None
    """Of pictures and frames in training as long as prompts are not whole yet, where those differ."""

    def counts_of(self, task: str) -> tuple[int, ...]:
        """How many pictures albums of a task have; none where the model was not trained on it."""
        return {"clip": self.clip_frames, "stream": self.stream_frames}.get(task, self.counts)


_SIZES: tuple[Size, ...] = ((224, 224), (112, 168), (168, 168), (168, 224), (224, 168), (224, 280))

TRAINED: dict[str, Bounds] = {
    "qwen2_5_vl": Bounds(
        sizes=_SIZES, counts=(1, 2, 3, 4, 6, 7), frame_side=112, clip_frames=(2, 3, 4, 6, 8),
        stream_frames=(6, 7, 8, 9, 11, 12, 14, 17, 20),
    ),
    "qwen3_vl": Bounds(
        sizes=_SIZES[:5], counts=(1, 2, 4), frame_side=112, clip_frames=(2, 3, 4, 6)
    ),
    "kimi_k25": Bounds(sizes=_SIZES, counts=(1, 2, 3, 4, 6, 7), frame_side=112, clip_frames=(2, 3, 4, 6, 8)),
    "deepseek_vl": Bounds(
        sizes=((224, 224),), counts=(1, 2, 4), frame_side=224, clip_frames=(2, 4), first_sizes=_SIZES[1:5],
        first_side=112,
    ),
}  # fmt: skip
"""What training draws."""

HELD_OUT: dict[str, Bounds] = {
    "qwen2_5_vl": Bounds(
        sizes=((224, 224), (196, 252)),
        counts=(5,),
        note=(56, 112),
        frame_side=112,
        clip_frames=(5, 7),
        stream_frames=(10, 16),
    ),
    "qwen3_vl": Bounds(sizes=((224, 224), (196, 196)), counts=(3,), frame_side=112, clip_frames=(5,)),
    "kimi_k25": Bounds(sizes=((224, 224), (196, 252)), counts=(5,), frame_side=112, clip_frames=(5, 7)),
    "deepseek_vl": Bounds(sizes=((224, 224),), counts=(3,), frame_side=224, clip_frames=(3,), note=(224, 224)),
}
"""What figures are reported on: numbers of pictures and, where a model takes several, sizes never trained on."""
