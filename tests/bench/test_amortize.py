"""When a patch is paid: the arithmetic, and that a round measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from looseleaf.bench import amortize
from looseleaf.cli import main


def test_what_was_paid_beforehand_is_divided_by_what_a_reuse_saves() -> None:
    costs = {"re-prefill": 10.0, "patched": 2.0, "alone": 9.0, "forming": 3.0, "merging": 1.0}
    assert amortize.break_even(costs) == {
        "break_even_reuses": 1.5,
        "break_even_without_harvest": 2.75,
        "break_even_orbit": 4.0,  # the images alone, six times their patches, five merges
        "break_even_orbit_without_harvest": 11.5,
    }
    assert amortize.break_even({**costs, "patched": 10.0})["break_even_reuses"] is None


def test_amortize_prints_every_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(amortize, "SMOL", {})
    monkeypatch.setattr(amortize, "SIDE", 112)
    plot = tmp_path / "plot.png"
    assert main(["bench", "amortize", "--quick", "--plot", str(plot)]) == 0
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert {"break_even_reuses", "break_even_without_harvest", "break_even_orbit"} <= set(printed["summary"])
    rows = {(row["dtype"], row["unit"]): row for row in printed["rows"]}
    assert len(rows) == 4
    assert all(row[key] > 0 for row in rows.values() for key in ("re-prefill", "patched", "alone"))
    assert rows["float32", "seconds"]["forming"] > 0
    assert rows["float32", "seconds"]["merging"] > 0
    counted = rows["float32", "rows"]
    assert counted["alone"] >= counted["re-prefill"] - counted["patched"]
    assert plot.stat().st_size > 1000
