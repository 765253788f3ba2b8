"""The model card of a trained folder: what it is, what it saw, what it cost, how well it answers, where it ends.

In: a folder with `training.json` and `accuracy.json`. Out: its README.md. Every figure is read from those two files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from looseleaf.workloads.bounds import HELD_OUT, TRAINED, Bounds

CLASSES = {
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "grouped-query attention, M-RoPE"),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "grouped-query attention, interleaved M-RoPE, deepstack"),
    "kimi_k25": ("KimiK25ForConditionalGeneration", "multi-head latent attention"),
    "deepseek_vl": ("DeepseekVLForConditionalGeneration", "multi-head attention"),
}

GOOD = 0.95

_STREAMS = ", streams in which a sign is up for a moment, and a search tool to call"
_TEXT = """---
license: apache-2.0
pipeline_tag: image-text-to-text
---
# looseleaf embedded: {family}

A vision-language model of {parameters:.1f} M parameters, trained from nothing for looseleaf: {classes}. It exists to
measure reuse: it answers questions that need one picture, and questions that connect several. It is not a general
assistant.

```python
from looseleaf import Looseleaf

ll = Looseleaf.open("embedded:{family}")
```

The folder also loads with plain `transformers.AutoModelForImageTextToText.from_pretrained`; `AutoProcessor` takes it
where torchvision is installed.

## Data

Everything is drawn by `looseleaf.workloads` from a seed: grids of coloured shapes with a key that gives shapes a
code, two versions of a grid, pages of names, ids and values in sixteen fonts, clips of numbered frames{streams}.
Questions and answers are English, in a fixed set of wordings. Prompts had {counts} pictures of {sizes} pixels.
Openings, words between pictures, orders and positions were random; half of the prompts hid pictures from the
question that later ones were read behind; a quarter kept pictures from seeing each other and asked single-hop
questions only, so that those do not come to lean on what reuse takes away. Figures below are on seeds, grids,
wordings and numbers of pictures ({held_counts}) that training never drew.

## Training

{steps:,} steps, {tokens:.0f} M tokens, {minutes:g} minutes on one {device}, seed {seed}: `python -m looseleaf.training
--family {family} --seed {seed} --minutes {minutes:g} --out FOLDER`. The course is in `training.json` and
`training.png`.

![What was learned when](training.png)

## Accuracy

Share of held-out questions answered right, read off one forward with the answer in place. *Blind*: pictures do not see
each other, which is what reuse without repair gives.

{table}

## Limits

- {weak}
- Answers questions about pictures as its data draws them: light sheets, these shapes, colours and words. Photographs,
  other languages and handwriting were never seen.
- Other questions get one sentence that says so, as far as they resemble those it was trained to turn down.
- Pictures of other sizes than above, and more than {most} of them, are outside of what was measured.
"""


def write_card(folder: Path) -> Path:
    """Write the README.md of a trained folder; returns its path."""
    record = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    rows = json.loads((folder / "accuracy.json").read_text(encoding="utf-8"))
    family = record["family"]
    trained, held = TRAINED[family], HELD_OUT[family]
    name, kind = CLASSES[family]
    text = _TEXT.format(
        family=family,
        parameters=record["parameters"] / 1e6,
        classes=f"`{name}` ({kind})",
        streams=", streams in which a sign is up for a moment, and a search tool to call"
        if trained.stream_frames
        else "",
        counts=_words(trained.counts),
        sizes=_words([f"{height} x {width}" for height, width in trained.sizes]),
        held_counts=_held(held),
        steps=record["steps"],
        tokens=record["tokens"] / 1e6,
        minutes=record["minutes"],
        device=record["device"],
        seed=record["seed"],
        table=_table(rows),
        weak=_weak(rows),
        most=max(trained.counts),
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path


def _words(items: Any) -> str:
    *most, last = map(str, items)
    return f"{', '.join(most)} or {last}" if most else last


def _held(held: Bounds) -> str:
    said = f"{_words(held.counts)} pictures, {_words(held.clip_frames)} frames of a clip"
    return said + (f", {_words(held.stream_frames)} of a stream" if held.stream_frames else "")


def _weak(rows: list[dict[str, Any]]) -> str:
    """What the reader must know before using it: where plain re-prefill is wrong more than one time in twenty."""
    low = [row for row in rows if row["setting"] == "reprefill" and row["right"] < GOOD]
    if not low:
        return f"Every task above is answered at {GOOD} or better by re-prefill."
    said = ", ".join(f"{row['task']} ({row['hops']} hop{'s' * (row['hops'] > 1)}) {row['right']:.2f}" for row in low)
    return f"**Not learned well**, below {GOOD} by re-prefill: {said}. Do not judge reuse on these."


def _table(rows: list[dict[str, Any]]) -> str:
    """Tasks down, settings across."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    tasks = list(dict.fromkeys((row["task"], row["hops"]) for row in rows))
    found = {(row["task"], row["hops"], row["setting"]): row for row in rows}
    lines = [f"| task | hops | n | {' | '.join(settings)} |", "| --- " * (len(settings) + 3) + "|"]
    for task, hops in tasks:
        cells = [found.get((task, hops, setting)) for setting in settings]
        count = next(cell["n"] for cell in cells if cell)
        shown = " | ".join("" if cell is None else f"{cell['right']:.3f}" for cell in cells)
        lines.append(f"| {task} | {hops} | {count} | {shown} |")
    return "\n".join(lines)
