"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon steps along the nearest orthogonal matrix to the momentum (Jordan et al., 2024). Matrices of one shape are
orthogonalised together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
DECAY = 0.02
SIZE = 0.8
"""Length of a Muon step beside one of AdamW at the same rate: 0.2 would be equal, longer learns faster here."""
PLAIN = 0.3
"""AdamW's share of the rate. Both were found on single pictures of one shape: colours were named after 100 steps in
place of 200 (and after more than 250 by AdamW alone)."""
TABLES = ("embed_tokens", "lm_head", "pos_emb", "position_embedding")
"""Parameters that are rows to look up, by name: each row learns by itself, so AdamW takes them."""
STEPS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Coefficients of the five polynomial steps towards an orthogonal matrix."""


class Optimiser:
    """Steps every parameter of a model."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        plain: list[nn.Parameter] = []
        for name, parameter in named:
            if parameter.dim() > 1 and not any(table in name for table in TABLES):
                groups[parameter.shape[0], parameter[0].numel()].append(parameter)
            else:
                plain.append(parameter)
        self._matrices: list[list[Tensor]] = [list(group) for group in groups.values()]
        self._moments = [torch.zeros(len(group), *shape, device=group[0].device) for shape, group in groups.items()]
        fused = plain[0].device.type == "cuda"
        self._plain = torch.optim.AdamW(plain, lr=1.0, betas=(0.9, 0.98), weight_decay=DECAY, fused=fused)
        self._parameters = [*plain, *(one for group in self._matrices for one in group)]

    @torch.no_grad()
    def step(self, rate: float) -> Tensor:
        """One step at a learning rate, gradients clipped to length 1 together; returns their length before."""
        length = nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._plain.param_groups:
            group["lr"] = rate * PLAIN
        self._plain.step()
        for group_matrices, group_moments in zip(self._matrices, self._moments, strict=True):
            # a batch without pictures has no slopes for the tower and what projects its rows
            sloped = [at for at, one in enumerate(group_matrices) if one.grad is not None]
            if not sloped:
                continue
            parameters = [group_matrices[at] for at in sloped]
            whole = len(sloped) == len(group_matrices)
            moments = group_moments if whole else group_moments[sloped]
            slopes = torch.stack([one.grad.flatten(1) for one in parameters if one.grad is not None])
            moments.lerp_(slopes, 1 - MOMENTUM)
            if not whole:
                group_moments[sloped] = moments
            steps = orthogonal(slopes.lerp(moments, MOMENTUM))
            size = SIZE * max(steps.shape[1:]) ** 0.5
            torch._foreach_mul_(parameters, 1 - rate * DECAY)
            shaped = [step.view_as(one) for step, one in zip(steps.to(parameters[0].dtype), parameters, strict=True)]
            torch._foreach_add_(parameters, shaped, alpha=-rate * size)
        for one in self._parameters:
            one.grad = None
        return length


def orthogonal(matrices: Tensor) -> Tensor:
    """About the orthogonal matrix nearest to each of [matrix, row, column]."""
    work = matrices.bfloat16()
    tall = work.shape[1] > work.shape[2]
    work = work.mT if tall else work
    work = work / (work.norm(dim=(1, 2), keepdim=True) * 1.02 + 1e-7)
    for a, b, c in STEPS:
        square = work @ work.mT
        work = a * work + (b * square + c * square @ square) @ work
    return work.mT if tall else work
