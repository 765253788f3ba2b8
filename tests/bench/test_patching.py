"""The benches about patches: a full patch is re-prefill, none is blind reuse, and every key is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from looseleaf import Looseleaf
from looseleaf.bench import rank, reuse
from looseleaf.bench.patching import Arm, Case, eta, make_case, try_patches, try_policy
from looseleaf.bench.rank import try_all
from looseleaf.bench.reorder import draw
from looseleaf.cli import main
from looseleaf.link.policies import FullReuse, Reprefill
from looseleaf.patch.basis import learn_basis
from looseleaf.patch.form import patch_of
from looseleaf.workloads.albums import HEADLINE
from looseleaf.workloads.bounds import HELD_OUT


@pytest.fixture(scope="module")
def made(opened: Callable[..., Looseleaf]) -> tuple[Looseleaf, Case]:
    ll = opened()
    (item,) = reuse.items(HELD_OUT["qwen2_5_vl"], "clip", 2, 1, 0)
    return ll, make_case(ll, item)


def test_a_full_patch_is_re_prefill_and_none_is_blind_reuse(made: tuple[Looseleaf, Case]) -> None:
    ll, case = made
    whole = {start: patch_of(one, case.alone[start], share=1) for start, one in case.deficits().items()}
    assert try_patches(ll, case, whole).kl < 1e-6
    assert not try_patches(ll, case, whole).changed
    blind = try_policy(ll, case, FullReuse())
    assert blind.kl > 1e-4
    assert try_patches(ll, case, {}) == blind
    assert try_policy(ll, case, Reprefill()) == Arm(kl=0, changed=False, right=bool(case.right))


def test_more_bytes_close_more_and_all_of_a_basis_or_of_the_tokens_closes_everything(
    made: tuple[Looseleaf, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    ll, case = made
    monkeypatch.setattr(rank, "SHARES", (0.06, 0.5, 1.0))
    found = try_all(ll, case, learn_basis(case.deficits().values()))
    for arm in ("patch", "home frame", "shared basis", "oracle tokens", "first tokens"):
        assert found[arm, 1.0].kl < 1e-3 * found["blind", 0.0].kl + 1e-7, arm
    assert found["patch", 0.5].kl < found["blind", 0.0].kl


def test_eta_is_of_all_cases_together() -> None:
    blind = [Arm(kl=0.3, changed=True, right=False), Arm(kl=0.1, changed=False, right=True)]
    half = [Arm(kl=0.1, changed=False, right=True), Arm(kl=0.1, changed=False, right=True)]
    assert eta(half, blind) == pytest.approx(0.5)
    assert eta(blind, blind) == 0
    assert eta(half, [Arm(kl=1e-5, changed=False, right=True)] * 2) is None


def test_the_patched_picture_comes_last_and_those_in_front_change_places() -> None:
    for one in draw(HELD_OUT["qwen2_5_vl"], 3, 2, 0):
        assert len(one.before) == 3
        item = one.ordered((2, 0, 1))
        assert item.chunks == [one.before[2], one.before[0], one.before[1], one.last]
        assert item.prompt[-1] == one.item.question.text


@pytest.mark.parametrize(
    ("bench", "keys"),
    [
        ("rank", ("knee_rank", "deep_half_eta", "shared_basis_eta", "oracle_half_tokens_eta")),
        ("reorder", ("eta_exact", "eta_orbit", "eta_transfer")),
    ],
)
def test_every_key_is_printed(
    bench: str, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reuse, "HEADLINE", {task: HEADLINE[task] for task in ("clip", "documents as text")})
    plot = tmp_path / "plot.png"
    assert main(["bench", bench, "--quick", "--model", "tiny:qwen3_vl", "--plot", str(plot)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    summary = printed["summary"]["tiny:qwen3_vl"]
    summary = summary.get("K=3", summary)
    assert set(keys) <= set(summary)
    assert plot.stat().st_size > 1000
