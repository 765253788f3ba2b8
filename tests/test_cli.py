"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImages

from looseleaf import cli
from looseleaf.errors import PromptError
from looseleaf.link.policies import POLICIES
from looseleaf.prompt.segments import Document, Image
from looseleaf.version import VERSION

TINY = ("--model", "tiny:qwen2_5_vl")
"""Random weights: it goes on to its last token and is never sure of anything."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a.png (4 visual tokens), b.png (6), page.txt, and files that are none of these."""
    made = tmp_path_factory.mktemp("files")
    PILImages.new("RGB", (56, 56), "red").save(made / "a.png")
    PILImages.new("RGB", (84, 56), "blue").save(made / "b.png")
    (made / "page.txt").write_text("The total is 1280 €.", encoding="utf-8")
    (made / "empty.txt").write_text("")
    (made / "latin.txt").write_bytes("Größe".encode("latin-1"))
    (made / "cut.png").write_bytes((made / "a.png").read_bytes()[:60])
    (made / "folder").mkdir()
    return made


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Run a command in that folder: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    before = set(threading.enumerate())

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            code = cli.main(arguments)
        except SystemExit as left:  # argparse's way
            code = int(left.code or 0)
        out, err = capsys.readouterr()
        return code, out, told(err)

    yield call
    left = {thread for thread in set(threading.enumerate()) - before if not isinstance(thread, threading.Timer)}
    assert not left, "a command leaves no thread behind"


def told(err: str) -> str:
    """What a command said on stderr, less what it was doing when that took longer than a second."""
    return "".join(line for line in err.splitlines(keepends=True) if not line.endswith(" …\n"))


def spans(plan: str) -> list[tuple[str, int]]:
    """What a printed plan says: each span's kind and size."""
    found = re.findall(r"\[ *(\d+), *(\d+)\)  (\w+)", plan)
    return [(kind, int(stop) - int(start)) for start, stop, kind in found]


def test_an_answer_goes_to_stdout_and_what_it_cost_to_stderr(run: Any) -> None:
    code, out, err = run("ask", "What is this?", "--image", "a.png", "--max-tokens", "3", *TINY)
    assert code == 0
    assert out.endswith("\n")
    assert out.strip()
    assert re.fullmatch(r"\d+ prompt tokens \(\d+ fresh; exact\), 3 answered; first token after .* ms \(.*\)\n", err)


def test_the_same_question_is_answered_the_same(run: Any) -> None:
    question = ("ask", *TINY, "What?", "--image", "a.png", "--max-tokens", "4", "--temperature", "1", "--seed", "5")
    assert run(*question)[1] == run(*question)[1] != run(*question[:-1], "6")[1]


def test_json_is_one_object_with_everything_in_it(run: Any) -> None:
    options = ("--image", "a.png", "--json", "--max-tokens", "3", "--policy", "full-reuse")
    code, out, _ = run("ask", "What?", *options, *TINY)
    assert code == 0
    assert out.count("\n") == 1
    said = json.loads(out)
    assert set(said) >= {"text", "finish_reason", "policy", "usage"}
    assert said["finish_reason"] == "length"
    assert said["policy"] == "full-reuse:relocate=true"
    usage = said["usage"]
    assert usage["completion_tokens"] == 3
    parts = [usage[f"{kind}_tokens"] for kind in ("exact", "relocated", "recomputed", "fresh")]
    assert sum(parts) == usage["prompt_tokens"]
    assert usage["timing"]["ttft_s"] > 0


def test_a_plan_is_printed_and_nothing_is_answered(run: Any) -> None:
    code, out, err = run("ask", "What?", "--image", "a.png", "--image", "b.png", "--plan", "--policy", "first-k:2")
    assert code == 0
    assert out.startswith("first-k:k=2: ")
    assert [kind for kind, _ in spans(out)] == ["text", "image", "image", "text"]
    assert err == ""


def test_a_plan_in_json_is_json(run: Any) -> None:
    _, out, _ = run("ask", "What?", "--plan", "--json")
    json.loads(out)


def test_files_come_before_the_question_in_the_order_given(run: Any) -> None:
    _, out, _ = run("ask", "Well?", "--image", "b.png", "--document", "page.txt", "--image", "a.png", "--plan")
    assert [kind for kind, _ in spans(out)] == ["text", "image", "document", "image", "text"]
    sizes = dict(zip(("b", "page", "a"), [size for kind, size in spans(out) if kind != "text"], strict=True))
    assert sizes["b"] == 6 + 2
    assert sizes["a"] == 4 + 2


def test_files_stand_where_the_question_puts_them(run: Any) -> None:
    _, out, _ = run("ask", "Is {2} like {1} or {2}?", "--image", "a.png", "--image", "b.png", "--plan")
    assert [one for one in spans(out) if one[0] == "image"] == [("image", 8), ("image", 6), ("image", 8)]
    assert [kind for kind, _ in spans(out)] == ["text", "image", "text", "image", "text", "image", "text"]


def test_segments_are_cut_at_the_numbers() -> None:
    attached = [("--image", "a.png"), ("--image", "b.png")]
    assert cli._segments("Why?", attached) == [Image("a.png"), Image("b.png"), "Why?"]
    assert cli._segments("Why?", []) == ["Why?"]
    assert cli._segments("{2} and {1}", attached) == [Image("b.png"), " and ", Image("a.png")]
    assert cli._segments("{1}{2}", attached) == [Image("a.png"), Image("b.png")]
    assert cli._segments("{ 1 } {a} {} {{1}}", attached[:1]) == ["{ 1 } {a} {} {", Image("a.png"), "}"]
    for wrong in ("{1} {2} {0}", "{1} {2} {3}", "{2} {1} {99}"):
        with pytest.raises(PromptError, match="but 2 files were given"):
            cli._segments(wrong, attached)


def test_a_document_is_read_as_utf8(folder: Path) -> None:
    assert cli._file("--document", str(folder / "page.txt")) == Document("The total is 1280 €.")


def test_no_file_is_dropped_silently(run: Any) -> None:
    code, _, err = run("ask", "What is {1}?", "--image", "a.png", "--image", "b.png", "--plan")
    assert code == 2
    assert "2" in err


ERRORS: dict[str, tuple[tuple[str, ...], str]] = {
    "no such image": (("--image", "nowhere.png"), "image 'nowhere.png' cannot be read: No such file"),
    "a cut off image": (("--image", "cut.png"), "is the file complete"),
    "a folder as image": (("--image", "folder"), "Is a directory"),
    "a text as image": (("--image", "page.txt"), "not an image"),
    "an http image": (("--image", "http://a.example/a.png"), "remote URLs are not fetched"),
    "no such document": (("--document", "nowhere.txt"), "document 'nowhere.txt' cannot be read as text"),
    "an image as document": (("--document", "a.png"), "document 'a.png' cannot be read as text"),
    "a document in another encoding": (("--document", "latin.txt"), "'latin.txt' cannot be read as text: 'utf-8'"),
    "an empty document": (("--document", "empty.txt"), "Document is empty"),
    "an unknown policy": (("--policy", "guess"), "unknown policy 'guess'; there are reprefill"),
    "a wrong policy field": (("--policy", "first-k:x"), "k must be a"),
    "no tokens": (("--max-tokens", "0"), "max_tokens must be >= 1, got 0"),
    "a negative temperature": (("--temperature", "-1"), "temperature must be >= 0"),
    "no number": (("--temperature", "nan"), "temperature must be >= 0"),
    "top_p of nothing": (("--top-p", "0"), "top_p must be above 0"),
    "a negative top_k": (("--top-k", "-1"), "top_k must be >= 0"),
    "an empty stop string": (("--stop", ""), "stop is"),
    "an unknown family": (("--model", "tiny:nope"), "there are qwen2_vl"),
    "a folder without a model": (("--model", "folder"), "is not a complete model folder"),
    "an unknown dtype": (("--dtype", "int8"), "dtype is one of float32"),
    "a length of nothing": (("--max-length", "0"), "max_length must be between 1 and"),
    "too short a length": (("--max-length", "30"), "takes 30 in all"),
    "too long an answer": (("--max-tokens", "1000000"), "lower max_tokens"),
    "an image for a text model": (("--model", "tiny:llama", "--image", "a.png"), "is a text model"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_one_line_on_stderr_and_exit_code_2(run: Any, name: str) -> None:
    options, says = ERRORS[name]
    code, out, err = run("ask", "What?", *options)
    assert (code, out) == (2, "")
    assert err.startswith("looseleaf: ")
    assert err.count("\n") == 1, err
    assert says in err


@pytest.mark.parametrize("question", ["", "  ", "What is {1}?", "What is {0}?"])
def test_a_question_that_cannot_be_asked_is_such_an_error_too(run: Any, question: str) -> None:
    code, out, err = run("ask", question)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("looseleaf: the ")


@pytest.mark.parametrize("device", ["toaster", "cuda:99"])
def test_a_device_that_is_not_there_is_such_an_error_too(run: Any, device: str) -> None:
    code, _, err = run("ask", "What?", "--device", device)
    assert (code, err.count("\n")) == (2, 1)


def test_a_seed_too_large_is_such_an_error_too(run: Any) -> None:
    # with --plan the request is only made, so that this test ends
    code, _, err = run("ask", "What?", "--temperature", "1", "--seed", str(2**70), "--plan")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("guess",),
        ("ask",),
        ("ask", "What?", "--colour", "red"),
        ("ask", "What?", "--max-tokens", "many"),
        ("ask", "What?", "--image"),
        ("bench", "guess"),
        ("bench",),
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_shows_usage_and_exits_with_2(run: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: looseleaf")
    assert "error: " in err.splitlines()[-1]


def commands() -> dict[str, argparse.ArgumentParser]:
    (choices,) = [one.choices for one in cli._parser()._actions if isinstance(one, argparse._SubParsersAction)]
    return dict(choices)


def test_help_lists_every_command(run: Any) -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert list(commands()) == ["ask", "bench", "calibrate", "demo", "doctor", "store"]
    for name in commands():
        assert re.search(rf"^ +{name}\s+\S", out, re.MULTILINE), f"{name} is listed with what it does"


@pytest.mark.parametrize("command", ["ask", "bench", "calibrate", "demo", "doctor", "store"])
def test_help_of_a_command_lists_every_option(run: Any, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    for action in commands()[command]._actions:
        for option in action.option_strings or action.choices or [action.dest]:
            assert option in out


def test_help_names_every_policy_and_bench(run: Any) -> None:
    said = " ".join(run("ask", "--help")[1].split())
    for name in POLICIES:
        assert name in said.replace("- ", "-")
    said = run("bench", "--help")[1]
    for name, question in cli.BENCHES.items():
        assert re.search(rf"{name} +{re.escape(question)}", said)


@pytest.mark.parametrize("command", ["ask", "bench", "demo"])
def test_every_option_says_what_it_does(command: str) -> None:
    silent = [action.dest for action in commands()[command]._actions if not action.help]
    assert silent == []


def test_the_version_is_told(run: Any) -> None:
    assert run("--version") == (0, f"looseleaf {VERSION}\n", "")


def test_stopping_it_is_no_crash(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.Looseleaf, "open", interrupted)
    assert run("ask", "What?") == (130, "", "looseleaf: stopped\n")


def test_the_doctor_checks_a_model(run: Any) -> None:
    code, out, _ = run("doctor", "--model", "tiny:smolvlm")
    assert code == 0
    assert "model smolvlm: 4 layers" in out
    assert "equal the model's own forward" in out
    assert out.splitlines()[-1].startswith("fine")


def test_stop_strings_end_the_answer(run: Any) -> None:
    ask = ("ask", "What?", "--max-tokens", "8", *TINY)
    whole = run(*ask)[1].removesuffix("\n")
    stop = whole[2:4]
    said = json.loads(run(*ask, "--stop", "zzz", "--stop", stop, "--json")[1])
    assert said["text"] == whole[: whole.index(stop)]
    assert said["finish_reason"] == "stop"


def test_it_runs_as_a_program_of_its_own(folder: Path) -> None:
    """Two real processes at once: one good, one bad; the answer is the one this process gets."""
    base = [sys.executable, "-m", "looseleaf", "ask", *TINY]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    good = subprocess.Popen([*base, "What is {1}?", "--image", "a.png", "--max-tokens", "4", "--json"], **pipes)
    bad = subprocess.Popen([*base, "What?", "--image", "nowhere.png"], **pipes)
    out, _ = good.communicate(timeout=120)
    assert good.returncode == 0
    assert json.loads(out)["usage"]["completion_tokens"] == 4
    out, err = bad.communicate(timeout=120)
    assert (bad.returncode, out) == (2, "")
    assert told(err) == "looseleaf: image 'nowhere.png' cannot be read: No such file or directory\n"


def test_a_reader_who_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "looseleaf", "ask", "Hello", "--model", "tiny:qwen2", "--plan"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        told = running.stderr.read()
    assert running.returncode == 141
    assert "Traceback" not in told
    assert "Broken pipe" not in told
