"""The paper's figures are drawn from what the benches print, and a figure without results is passed over."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from looseleaf.bench import cases
from looseleaf.cli import main
from looseleaf.workloads.albums import HEADLINE


@pytest.fixture
def figures() -> ModuleType:
    path = Path(__file__).parent.parent / "tools" / "figures.py"
    spec = importlib.util.spec_from_file_location("figures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_figures_are_drawn_from_results(
    figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cases, "HEADLINE", {task: HEADLINE[task] for task in ("clip", "documents as text")})
    results, out = tmp_path / "results", tmp_path / "out"
    for bench, more in (("reuse", ["--analyse", str(tmp_path / "shape.png")]), ("rank", [])):
        saved = str(results / f"{bench}.json")
        assert main(["bench", bench, "--count", "1", "--model", "tiny:qwen3_vl", "--save", saved, *more]) == 0
    capsys.readouterr()
    figures.main(results, out)
    told = capsys.readouterr().out
    drawn = {path.stem for path in out.iterdir() if path.stat().st_size > 5000}
    assert drawn == {f"figure-{number}" for number in (3, 5, 6, 7, 8, 9, 10)}
    assert "figure-11: no result of bench segment and amortize" in told
    (results / "again.json").write_text((results / "rank.json").read_text())
    with pytest.raises(SystemExit, match="has another result of bench rank"):
        figures.main(results, out)
