"""The benches about patches: a full patch is re-prefill, none is blind reuse, and every key is printed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from looseleaf import Looseleaf, Patched
from looseleaf.bench import cases, rank
from looseleaf.bench.cases import (
    TOGETHER,
    Arm,
    Asking,
    Case,
    Try,
    closed,
    items,
    make_cases,
    mean_kl,
    rounds,
    try_all,
)  # fmt: skip
from looseleaf.bench.envelope import DRIFTS, drifted
from looseleaf.bench.reorder import draw
from looseleaf.bench.reuse import patches_of
from looseleaf.bench.window import TURNOVER, _turned
from looseleaf.cli import main
from looseleaf.kv.records import Patch
from looseleaf.link.policies import FullReuse, Reprefill
from looseleaf.link.reference import Way, divergence
from looseleaf.patch.basis import learn_basis
from looseleaf.patch.form import patch_of
from looseleaf.workloads.albums import HEADLINE
from looseleaf.workloads.bounds import HELD_OUT


@pytest.fixture(scope="module")
def made(opened: Callable[..., Looseleaf]) -> tuple[Looseleaf, list[Case]]:
    ll = opened()
    return ll, make_cases(ll, list(items(HELD_OUT["qwen2_5_vl"], "clip", 2, 2, 0)))


def test_a_full_patch_is_re_prefill_and_none_is_blind_reuse(made: tuple[Looseleaf, list[Case]]) -> None:
    ll, asked = made
    tries = [
        {
            "whole": Try(patches={at: patch_of(one, case.alone[at], share=1) for at, one in case.deficits.items()}),
            "none": Try(),
            "policy": Try(policy=FullReuse()),
            "all": Try(policy=Reprefill()),
        }
        for case in asked
    ]
    for case, arms in zip(asked, try_all(ll, asked, tries), strict=True):
        assert arms["whole"].kl < 1e-6
        assert not arms["whole"].changed
        assert arms["none"] == arms["policy"]
        assert arms["none"].kl > 1e-4
        assert arms["all"].kl < 1e-9
        assert arms["all"].right == case.right


def test_together_is_as_alone(made: tuple[Looseleaf, list[Case]]) -> None:
    ll, asked = made
    ways = [Way(prompt=case.prompt, policy=FullReuse(), answer=case.told) for case in asked]
    for way, together in zip(ways, ll.reference.along(ways), strict=True):
        assert divergence(ll.reference.along([way])[0], together) < 1e-9


def test_patches_made_by_hand_are_those_a_request_leaves_behind(made: tuple[Looseleaf, list[Case]]) -> None:
    ll, (case, _) = made
    policy = Patched(share=0.25)
    ll.ask(case.item.prompt, policy=policy, max_tokens=1)
    ll.settle()
    by_hand, harvested = ll.reference.along([
        Way(prompt=case.prompt, policy=FullReuse(), answer=case.told, patches=patches_of(case)[0.25]),
        Way(prompt=case.prompt, policy=policy, answer=case.told),
    ])  # fmt: skip
    assert ll.linker.plan(case.prompt, policy).count().patched
    assert divergence(by_hand, harvested) < 1e-6


def test_more_bytes_close_more_and_everything_closes_everything(
    made: tuple[Looseleaf, list[Case]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ll, (case, _) = made
    monkeypatch.setattr(rank, "SHARES", (0.06, 0.5, 1.0))
    ways = rank.ways(ll, case, learn_basis(case.deficits.values()))
    (found,) = try_all(ll, [case], [ways])
    for arm in ("patch", "home frame", "shared basis", "oracle tokens", "first tokens"):
        assert found[arm, 1.0].kl < 1e-3 * found["blind", 0.0].kl + 1e-7, arm
    assert found["patch", 0.5].kl < found["blind", 0.0].kl
    assert found["blind", 0.0].rank == 0 < found["patch", 0.06].rank < found["patch", 0.5].rank


def test_smaller_patches_are_cut_from_larger_ones(made: tuple[Looseleaf, list[Case]]) -> None:
    _, (case, _) = made
    small, large = patches_of(case).values()
    page = sum(rows.nbytes for rows in case.alone.values())

    def size(patches: dict[int, Patch]) -> int:
        return sum(one.nbytes for one in patches.values())

    assert size(small) < size(large) <= 0.25 * page


def test_eta_is_of_all_cases_together() -> None:
    blind = [Arm(kl=0.3, changed=True, right=False), Arm(kl=0.1, changed=False, right=True)]
    half = [Arm(kl=0.1, changed=False, right=True), Arm(kl=0.1, changed=False, right=True)]
    assert closed(mean_kl(half), mean_kl(blind)) == pytest.approx(0.5)
    assert closed(mean_kl(blind), mean_kl(blind)) == 0
    assert closed(0.1, 0.2, noise=0.3) is None
    assert closed(1e-6, 1e-5) is None


def test_the_patched_picture_comes_last_and_those_in_front_change_places() -> None:
    for number in range(2):
        one = draw(HELD_OUT["qwen2_5_vl"], 3, 0, number)
        assert len(one.before) == 3
        item = one.ordered((2, 0, 1))
        assert item.chunks == [one.before[2], one.before[0], one.before[1], one.last]
        assert item.prompt[-1] == one.item.question.text


def test_a_drift_changes_what_it_says_and_keeps_the_last_needed_picture() -> None:
    (item,) = items(HELD_OUT["qwen2_5_vl"], "change", 2, 1, 0)
    (other,) = items(HELD_OUT["qwen2_5_vl"], "change", 2, 1, 1)
    last = item.chunks[max(item.question.needs)]
    found = {drift: drifted(drift, item, other, Random(0)) for drift in DRIFTS}
    for drift, moved in found.items():
        if moved is not None:
            assert last in moved.chunks, drift
            assert moved.question == item.question
    assert found["one more"] is not None
    assert found["one more"].chunks == [other.chunks[0], *item.chunks]
    assert found["other words"] is not None
    assert found["other words"].chunks == item.chunks
    assert found["other words"].prompt != item.prompt
    assert found["replaced"] is not None
    assert sum(one not in item.chunks for one in found["replaced"].chunks) == 1


def test_a_question_counts_for_the_turnovers_it_can_have() -> None:
    (item,) = items(HELD_OUT["qwen3_vl"], "change", 2, 1, 0)
    (other,) = items(HELD_OUT["qwen3_vl"], "change", 2, 1, 1)
    two = replace(item, question=replace(item.question, needs=(0, 2)))
    found = [_turned(two, other, share, Random(0)) for share in TURNOVER]
    assert [one is None for one in found] == [False, True, False, True, False]
    replaced = [sum(chunk not in item.chunks for chunk in one.chunks) for one in found if one is not None]
    assert replaced == [0, 1, 2]
    assert all(one.chunks[2] == item.chunks[2] for one in found if one is not None)


def test_every_question_is_asked_by_one_worker() -> None:
    def asked(**part: int) -> list[str]:
        asking = Asking(count=3 * TOGETHER - 2, **part)
        return [one.question.text for _, some in rounds(HELD_OUT["qwen2_5_vl"], "change", 2, asking) for one in some]

    apart = [one for part in range(2) for one in asked(part=part, of=2)]
    assert len(asked()) == 3 * TOGETHER - 2
    assert sorted(apart) == sorted(asked())


def test_workers_find_what_one_process_finds(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for workers in ("1", "2"):
        command = ["bench", "reorder", "--quick", "--count", "2", "--model", "tiny:qwen3_vl", "--workers", workers]
        assert main(command) == 0
        (row,) = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["rows"]
        assert row.pop("model") == "tiny:qwen3_vl"
        rows.append(row)
    assert rows[0] == pytest.approx(rows[1], rel=1e-3)


def test_a_worker_that_fails_ends_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reorder", "--model", "tiny:smolvlm", "--workers", "2"]) == 2
    assert "no questions for smolvlm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "keys"),
    [
        ("rank", ("knee_rank", "deep_half_eta", "shared_basis_eta", "oracle_half_tokens_eta")),
        ("reorder", ("eta_exact", "eta_orbit", "eta_transfer")),
        ("envelope", ("eta", "update_eta")),
        ("window", ("survivor_forget_kl", "survivor_remember_kl", "recall_fresh_eta", "recall_stale_eta")),
    ],
)
def test_every_key_is_printed(
    bench: str, keys: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cases, "HEADLINE", {task: HEADLINE[task] for task in ("clip", "documents as text")})
    plot = tmp_path / "plot.png"
    assert main(["bench", bench, "--quick", "--model", "tiny:qwen3_vl", "--plot", str(plot)]) == 0
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    summary = printed["summary"]["tiny:qwen3_vl"]
    summary = summary.get("K=3", summary)
    assert set(keys) <= set(summary)
    assert plot.stat().st_size > 1000
