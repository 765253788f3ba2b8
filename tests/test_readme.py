"""The README's generated parts are fresh, and what it tells people to type works."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from looseleaf.cli import _parser
from looseleaf.link.policies import POLICIES

ROOT = Path(__file__).parent.parent


def test_generated_parts_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "readme.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_policy_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(policy.__name__ in text for policy in POLICIES.values())


def test_every_shown_command_parses() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for line in re.findall(r"^looseleaf (.+?)(?:\s+#.*)?$", page.read_text(encoding="utf-8"), re.M):
            words = re.findall(r'"[^"]*"|\S+', line)
            _parser().parse_args([word.strip('"') for word in words])


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_tour_names_files_that_exist_and_misses_no_folder() -> None:
    text = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)?\w+\.py)`", text))
    assert all((ROOT / "looseleaf" / name).exists() for name in named)
    beside = {"bench", "demo", "training", "workloads"}
    folders = {path.parent.name for path in (ROOT / "looseleaf").glob("*/__init__.py")} - beside
    assert {name.split("/")[0] for name in named if "/" in name} == folders
