"""Benches print a table, then one line of JSON with every key the design names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looseleaf.bench import segment
from looseleaf.cli import main
from looseleaf.model.tiny import build_tiny


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    printed: dict[str, object] = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {"bench", "commit", "hardware", "model", "seed", "rows", "summary"} <= printed.keys()
    return printed


def test_exact_prints_every_key_and_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot, saved = tmp_path / "exact.png", tmp_path / "exact.json"
    assert main(["bench", "exact", "--quick", "--model", "qwen3_vl", "--plot", str(plot), "--save", str(saved)]) == 0
    printed = last_line(capsys)
    summary = printed["summary"]
    assert isinstance(summary, dict)
    assert summary["models"] == 1
    assert summary["logit_err_max"] <= 1e-4
    assert summary["greedy_equal"] is True
    assert summary["mask_oracle_err_max"] <= 1e-4
    assert summary["relocate_pair_ulp_max"] == 0
    assert summary["shift_noise_ratio"] <= 2
    assert summary["packed_err_max"] <= 1e-4
    assert summary["negative_controls_caught"] == "4/4"
    assert plot.stat().st_size > 1000
    assert json.loads(saved.read_text()) == printed


def test_ttft_prints_every_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, plot = build_tiny("qwen2_5_vl", tmp_path / "model"), tmp_path / "ttft.png"
    assert main(["bench", "ttft", "--quick", "--model", str(model), "--plot", str(plot)]) == 0
    summary = last_line(capsys)["summary"]
    assert isinstance(summary, dict)
    for key in (
        "reprefill_over_transformers", "decode_over_transformers", "decode8_over_transformers", "reuse_over_floor",
        "first_k_over_floor", "full_reuse_speedup", "first_k_speedup",
    ):  # fmt: skip
        assert all(summary[key][dtype] > 0 for dtype in ("float32", "bfloat16"))
    assert summary["tokens"]["float32"]["reused"] == 4 * 258
    assert plot.stat().st_size > 1000


def test_segment_prints_every_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment, "SMOL", {})
    monkeypatch.setattr(segment, "GRIDS", {16: (4, 4)})
    plot = tmp_path / "segment.png"
    assert main(["bench", "segment", "--quick", "--plot", str(plot)]) == 0
    printed = last_line(capsys)
    summary, (row,) = printed["summary"], printed["rows"]
    assert isinstance(summary, dict)
    for key in ("link_speedup", "patched_link_speedup", "link_over_floor", "ttft_speedup", "ttft_over_weights"):
        assert all(value > 0 for value in summary[key].values())
    assert row["tokens"] == 18
    assert plot.stat().st_size > 1000
