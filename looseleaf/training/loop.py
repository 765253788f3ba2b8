"""Trains one embedded model and says how well it answers. One GPU, nine minutes at most.

    python -m looseleaf.training --family qwen2_5_vl --seed 1 --minutes 8 --out models/

Writes a folder that plain `from_pretrained` loads, a log of the run and its curve. The learning rate and the course
follow the clock, so that a slower machine trains less, not longer.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import cross_entropy

from looseleaf.training.attention import BLOCK, in_blocks
from looseleaf.training.batches import KINDS, Batch, Diet, load_batches
from looseleaf.training.corpus import corpus
from looseleaf.training.course import BATCHES, Course
from looseleaf.training.drills import DRILLS
from looseleaf.training.families import Trainee
from looseleaf.training.optimiser import Optimiser
from looseleaf.training.painter import Painter
from looseleaf.training.prompts import Writer, read_format
from looseleaf.training.recipes import build_folder
from looseleaf.workloads.bounds import TRAINED

DIETS: dict[str, Diet] = {
    "qwen2_5_vl": Diet(
        bounds=TRAINED["qwen2_5_vl"], length=1024, batch=128, pictures=0.56, clips=0.2, streams=0.12, lookups=0.12
    ),
    "qwen3_vl": Diet(bounds=TRAINED["qwen3_vl"], length=1536, batch=64, questions=0.9),
    "kimi_k25": Diet(bounds=TRAINED["kimi_k25"], length=1024, batch=128),
    "deepseek_vl": Diet(bounds=TRAINED["deepseek_vl"], length=1536, batch=64, questions=0.9),
}
WARM_STEPS = 100
COOLING = 1.5
"""Power by which the rate falls with the time that is left. Muon's long steps find a skill soon, then keep shaking it:
at a constant rate what had been at 0.99 was at 0.64 a hundred steps later."""
LOOK = 50
"""Steps between two looks at what is right by now."""
NOISE = 0.02
"""Deviation of what is added to every pixel in training."""


class Pass:
    """One forward over a batch: paint, look, read, predict."""

    def __init__(self, trainee: Trainee, device: str) -> None:
        self.trainee, self.device = trainee, device
        self.compiled = False
        """Whether attention is compiled for a GPU."""
        self.painter = Painter(device)

    def mask(self, batch: Batch) -> Tensor | BlockMask:
        """Who sees whom [batch, 1, token, token]: what is before it in a segment it sees. Compiled layers: blocks."""
        rows, length = batch.ids.shape
        place = torch.arange(length, device=self.device)
        number = torch.arange(rows, device=self.device)[:, None, None]
        seen = batch.sees[number, batch.segments[:, :, None], batch.segments[:, None, :]]
        mask = (seen & (place[:, None] >= place))[:, None]
        # what is not compiled does not skip blocks, it only takes more memory for them
        whole = not self.compiled or length % BLOCK
        return mask if whole else in_blocks(mask)

    def __call__(self, batch: Batch, *, noise: float = 0.0) -> tuple[Tensor, Tensor]:
        """Logits [target, vocabulary] where the batch has targets, and the targets [target]."""
        trainee = self.trainee
        slots = batch.ids == trainee.pad_id
        embeds = trainee.embed(batch.ids)
        deep: list[Tensor] = []
        if len(batch.grounds):
            images = self.painter.paint(batch.shapes, batch.letters, batch.grounds, *batch.size)
            if noise:
                images = images + noise * torch.randn_like(images)
            features = trainee.features(images)
            embeds = trainee.fill(embeds, slots, features.rows.flatten(0, 1))
            deep = [one.flatten(0, 1) for one in features.deep]
        hidden = trainee.hidden(embeds, batch.positions, self.mask(batch), slots, deep)
        return trainee.logits(hidden.flatten(0, 1)[batch.where]), batch.targets.flatten()[batch.where]


def train(
    family: str, out: Path, *, seed: int, minutes: float, device: str = "cuda", workers: int = 14,
    compiled: bool = True, rate: float = 1e-3, diet: Diet | None = None,
    tell: Callable[[str], None] = print, steps: int | None = None,
) -> tuple[Trainee, Writer, Pass]:  # fmt: skip
    """Train `family` into `out` for `minutes`, compilation included, or for `steps`."""
    started = time.perf_counter()
    diet = diet or DIETS[family]
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    build_folder(family, out, corpus=corpus(), seed=seed)
    trainee = Trainee.load(out, device=device)
    writer = writer_of(trainee)
    course = Course(diet.mixed)
    batches: Iterator[Batch] = load_batches(writer, diet, course, seed=seed, workers=workers)
    if compiled:
        compile_blocks(trainee)
    forward = Pass(trainee, device)
    forward.compiled = compiled and device == "cuda"
    trainee.model.train()
    optimiser = Optimiser(trainee.model.named_parameters())
    log: list[dict[str, Any]] = []
    count = sum(one.numel() for one in trainee.model.parameters())
    tell(f"{family}: {count / 1e6:.1f} M parameters, ready after {time.perf_counter() - started:.0f} s")
    step, waited = 0, 0.0
    score = torch.zeros(2, len(BATCHES), len(KINDS), device=device)
    while True:
        spent = (time.perf_counter() - started) / (minutes * 60) if steps is None else step / steps
        if spent >= 1:
            break
        asked = time.perf_counter()
        batch = next(batches).to(device)
        waited += time.perf_counter() - asked
        now = rate * min(1.0, (step + 1) / WARM_STEPS) * max(0.02, (1 - spent) ** COOLING)
        with torch.autocast(device, torch.bfloat16):
            logits, targets = forward(batch, noise=NOISE)
        loss = cross_entropy(logits.float(), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        length = optimiser.step(now)
        trainee.shorten()
        score[:, BATCHES.index(batch.kind)] += _right_by_kind(logits, targets, batch)
        step += 1
        if step % LOOK == 0 or step == 1:
            row: dict[str, Any] = {
                "step": step, "s": round(time.perf_counter() - started, 1), "loss": round(loss.item(), 4),
                "length": round(float(length), 2), "kind": batch.kind, "rate": now, "level": course.number,
                "drilled": course.drilled, "skills": _right_by_skill(score), "right": _shares_of(KINDS, score.sum(1)),
            }  # fmt: skip
            score.zero_()
            log.append(row)
            new = course.heed(step, row["skills"])
            if new or step % (2 * LOOK if step < 2000 else 4 * LOOK) == 0 or step == 1:
                tell(_line(row, waited, course))
    del batches
    gc.collect()  # its workers end here, not in processes forked later
    trainee.model.eval()
    forward.compiled = False  # evaluation takes layers as they are
    trainee.save(out)
    gpu = torch.cuda.get_device_name() if device == "cuda" else device
    record = {
        "family": family, "seed": seed, "minutes": minutes, "device": gpu, "torch": torch.__version__, "steps": step,
        "parameters": count, "tokens": step * diet.batch * diet.length, "log": log,
    }  # fmt: skip
    (out / "training.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    plot(log, out / "training.png")
    return trainee, writer, forward


def compile_blocks(trainee: Trainee) -> None:
    """Compile every block in place; equal blocks share what is compiled."""
    torch._dynamo.config.recompile_limit = 64
    for block in trainee.tower.blocks:
        block.compile(dynamic=True)  # the number of pictures changes from batch to batch
    for layer in trainee.text.layers:
        layer.compile(dynamic=False)


def writer_of(trainee: Trainee) -> Writer:
    """A writer in the trainee's own format."""
    form = read_format(
        trainee.tokenizer, image=trainee.image_text, pad_id=trainee.pad_id, axes=trainee.axes, grid=trainee.grid
    )
    return Writer(trainee.tokenizer, form)


@torch.no_grad()
def _right_by_kind(logits: Tensor, targets: Tensor, batch: Batch) -> Tensor:
    """Answer tokens predicted right, and all: [2, kind]."""
    kinds = batch.kinds.flatten()[batch.where]
    right = (logits.argmax(-1) == targets).float()
    sums = torch.zeros(2, len(KINDS), device=logits.device)
    return sums.index_add_(1, kinds, torch.stack([right, torch.ones_like(right)]))


def _shares_of(names: Sequence[str], sums: Tensor) -> dict[str, float]:
    right, total = sums.tolist()
    return {name: round(r / t, 4) for name, r, t in zip(names, right, total, strict=True) if t}


def _right_by_skill(score: Tensor) -> dict[str, float]:
    """Of the kind of question a skill is judged by; pages of words are a skill of their own."""
    words = BATCHES.index("words")
    sums = score.sum(1) - score[:, words]
    columns = [(score[:, words] if skill == "words" else sums)[:, KINDS.index(drill.asks[0])]
               for skill, drill in DRILLS.items()]  # fmt: skip
    return _shares_of(tuple(DRILLS), torch.stack(columns, dim=1))


def _line(row: Mapping[str, Any], waited: float, course: Course) -> str:
    skills, kinds = (
        " ".join(f"{name} {value:.2f}" for name, value in part.items() if value)
        for part in (course.right, row["right"])
    )
    return (
        f"{row['step']} {row['s']:.0f}s level {row['level']} {row['drilled']} waited {waited:.0f}s loss {row['loss']} "
        f"{skills} | {kinds}"
    )


def plot(log: list[dict[str, Any]], path: Path) -> None:
    """What is right over the run: by skill, by plain question."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    every = ("colour", "shape", "code", "changed_cell", "changed_to", "value_of", "happened", "sign_chain", "found")
    for axes, part, names in zip(figure.subplots(1, 2), ("skills", "right"), (tuple(DRILLS), every), strict=True):
        for number, name in enumerate(names):
            rows = [row for row in log if name in row[part]]
            style = "-" if number < 10 else "--"
            axes.plot([row["s"] for row in rows], [row[part][name] for row in rows], style, label=name, linewidth=1)
        for before, row in pairwise(log):
            if row["level"] > before["level"]:
                axes.axvline(row["s"], color="0.8", linewidth=1, zorder=0)
        axes.set(xlabel="seconds", ylabel=f"answer tokens right, {'skills' if part == 'skills' else 'plain questions'}")
        axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower right")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
