"""Training on a GPU: what is compiled computes the gradients that plain eager fp32 does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import Parameter
from torch.nn.functional import cross_entropy

from looseleaf.training.batches import load_batches
from looseleaf.training.corpus import corpus
from looseleaf.training.course import Course
from looseleaf.training.families import Trainee
from looseleaf.training.loop import DIETS, Pass, compile_blocks, writer_of
from looseleaf.training.recipes import RECIPES, build_folder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # torch.compile's own, by version
]


@pytest.mark.parametrize("name", RECIPES)
def test_compiled_gradients_are_the_plain_ones(name: str, tmp_path: Path) -> None:
    """As near to plain fp32's as plain bf16's are: small ones deep in a tower lose most to rounding."""
    folder = build_folder(name, tmp_path / name, corpus=corpus(), seed=1)
    plain, rounded, ours = (Trainee.load(folder, device="cuda") for _ in range(3))
    compile_blocks(ours)
    diet = replace(DIETS[name], batch=4)
    course = Course(diet.mixed)
    step = 0
    for level in course.levels[:4]:  # words, lines, then pictures
        step += int(level.steps)
        course.heed(step, {"line": 1.0})
        batch = next(load_batches(writer_of(plain), diet, course, seed=1, workers=0)).to("cuda")
        for trainee, kind in ((plain, torch.float32), (rounded, torch.bfloat16), (ours, torch.bfloat16)):
            trainee.model.zero_grad()
            with torch.autocast("cuda", kind, enabled=kind is not torch.float32):
                forward = Pass(trainee, "cuda")
                forward.compiled = trainee is ours
                logits, targets = forward(batch)
            cross_entropy(logits.float(), targets).backward()
        parameters = (one.model.named_parameters() for one in (plain, rounded, ours))
        for (label, one), (_, other), (_, own) in zip(*parameters, strict=True):
            if one.grad is None or one.grad.norm() < 1e-6:
                continue
            lost, lost_by_rounding = (1 - _alike(one, each) for each in (own, other))
            assert lost < max(0.03, 1.5 * lost_by_rounding), (batch.kind, label, lost, lost_by_rounding)


def _alike(one: Parameter, other: Parameter) -> float:
    """Cosine of two gradients."""
    assert one.grad is not None
    assert other.grad is not None
    return float(torch.cosine_similarity(one.grad.flatten(), other.grad.flatten(), dim=0))
