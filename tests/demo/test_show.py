"""The demo from end to end, quick: what it prints, saves and says in its last line, and which models it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImages

from looseleaf import cli
from looseleaf.bench.report import Share
from looseleaf.demo import DemoOptions, run_demo
from looseleaf.demo.measure import PARTIAL
from looseleaf.demo.show import TASKS, _verdict, trained_as
from looseleaf.errors import ConfigError
from looseleaf.system import DEFAULT_MODEL, Looseleaf
from looseleaf.training.prompts import HARMLESS
from looseleaf.workloads.albums import HEADLINE

POLICIES = ("reprefill", "prefix-cache", "full-reuse", *PARTIAL, "patched")


class Shown:
    """What one run left behind."""

    def __init__(self, folder: Path, printed: str) -> None:
        self.folder = folder
        self.text, self.line = printed.rstrip("\n").rsplit("\n", 1)
        self.summary: dict[str, Any] = json.loads(self.line)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    """The default model's demo, run once."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda line: lines.append(line))
        run_demo(DemoOptions(out=folder, quick=True))
    return Shown(folder, (folder / "output.txt").read_text(encoding="utf-8") + "\n".join(lines))


def test_opening_nothing_opens_the_trained_model() -> None:
    assert trained_as(DEFAULT_MODEL) is not None
    with Looseleaf.open() as ll:
        assert ll.ask("Who is the president of France?").text.strip() == HARMLESS


def test_the_pictures_the_output_and_the_figures_are_saved(shown: Shown) -> None:
    for name in ("album.png", "policies.png"):
        with PILImages.open(shown.folder / name) as picture:
            assert min(picture.size) > 300
    assert json.loads((shown.folder / "summary.json").read_text(encoding="utf-8")) == shown.summary
    for file in shown.folder.iterdir():
        assert file.name in shown.text, "it says what it saved"


def test_every_part_is_there_and_fits_a_hundred_columns(shown: Shown) -> None:
    assert re.findall(r"^(\d) · ", shown.text, re.M) == list("123456")
    wide = [line for line in shown.text.splitlines() if len(line) > 100 and str(shown.folder) not in line]
    assert wide == []


def test_every_policy_is_timed_and_measured(shown: Shown) -> None:
    assert tuple(shown.summary["album"]) == POLICIES
    assert tuple(shown.summary["accuracy"]) == POLICIES
    for columns in shown.summary["accuracy"].values():
        assert list(columns) == ["single-hop", *(f"multi-hop: {task}" for task in TASKS)]
        assert all(0 <= one["low"] <= one["right"] / one["n"] <= one["high"] <= 1 for one in columns.values())
    for name in POLICIES:
        assert len(re.findall(rf"^{name} ", shown.text, re.M)) >= 2, f"{name} is in both tables"


def test_patches_compute_as_little_as_full_reuse(shown: Shown) -> None:
    album = shown.summary["album"]
    assert album["patched"]["computed_tokens"] == album["full-reuse"]["computed_tokens"]


def test_a_prefix_cache_hits_where_images_stood_and_misses_them_once_moved(shown: Shown) -> None:
    hits = dict(shown.summary["prefix_hits"])
    assert hits.pop("where they stood") > 4 * shown.summary["image_tokens"]
    assert set(hits) == {"other words", "a later turn", "another order"}
    assert max(hits.values()) < shown.summary["image_tokens"]


def test_reuse_computes_less_and_is_faster(shown: Shown) -> None:
    album = shown.summary["album"]
    assert album["reprefill"]["computed_tokens"] == album["reprefill"]["prompt_tokens"]
    for name in PARTIAL:
        assert album["full-reuse"]["computed_tokens"] < album[name]["computed_tokens"]
        assert album[name]["computed_tokens"] < album["reprefill"]["computed_tokens"]
    assert album["full-reuse"]["ttft_ms"] < album["reprefill"]["ttft_ms"]


def test_recomputing_everything_equals_transformers_and_the_control_does_not(shown: Shown) -> None:
    assert shown.summary["logit_difference"] < 1e-3
    assert shown.summary["blind_difference"] < 1e-3
    assert shown.summary["control_difference"] > 1e-1
    assert shown.summary["greedy_equal"]


def test_the_trained_model_answers_single_hop_questions_and_others_harmlessly(shown: Shown) -> None:
    assert shown.summary["trained"]
    single = shown.summary["accuracy"]["reprefill"]["single-hop"]
    assert single["right"] >= 0.8 * single["n"]
    assert shown.summary["outside"] == {
        "question": "Who is the president of France?", "answer": HARMLESS, "harmless": True,
    }  # fmt: skip


def test_random_weights_are_taken_and_said_to_mean_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--quick", "--model", "tiny:qwen3_vl", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "mean nothing" in out
    assert "figures mean nothing" in " ".join(out.split())
    last = json.loads(out.splitlines()[-1])
    assert not last["trained"]
    assert last["logit_difference"] < 1e-3


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("tiny:llama", "is a text model"),
        ("someone/a-model", "was not trained on them: use embedded:"),
        ("embedded:nope", "was not trained on them: use embedded:"),
        ("tiny:nope", "there is no tiny model"),
    ],
)
def test_other_models_are_refused_in_one_line(
    model: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", "--model", model, "--out", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_a_folder_that_training_wrote_is_known_by_its_record(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        trained_as(str(tmp_path))
    (tmp_path / "training.json").write_text('{"family": "kimi_k25"}', encoding="utf-8")
    assert trained_as(str(tmp_path)) == "kimi_k25"


def test_the_tasks_exist() -> None:
    assert set(TASKS) <= set(HEADLINE)


def test_the_verdict_says_what_was_measured() -> None:
    def column(**right: int) -> dict[str, Share]:
        return {name: Share(right=right.get(name.replace("-", "_"), 0), n=10) for name in POLICIES}

    kept = column(reprefill=10, full_reuse=9)
    assert "loses: nothing" in _verdict({"single-hop": kept})
    said = _verdict({"single-hop": kept, "multi-hop: clip": column(reprefill=8, full_reuse=1, first_k=5, patched=7)})
    assert "keeps: single-hop (1.00 → 0.90). It loses: multi-hop: clip (0.80 → 0.10)." in said
    assert "first-k restores most" in said
    assert "0.10 → 0.70 (re-prefill 0.80)" in said
