"""The examples run and do what they say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_agent_answers_from_its_window_and_looks_back(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "agent.py"), run_name="__main__")
    *steps, last = capsys.readouterr().out.strip().splitlines()
    assert len(steps) == 11
    assert not any("wrong" in step for step in steps)
    assert any("look back" in step for step in steps)
    assert "7 images looked at, once each" in last
