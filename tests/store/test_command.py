"""`looseleaf store`: what people see of a folder."""

import json
from pathlib import Path

import pytest
import torch

from looseleaf.cli import main
from looseleaf.kv.records import Features, States
from looseleaf.store.disk import DiskStore
from looseleaf.store.protocol import Key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = DiskStore(tmp_path, 10_000, clock=lambda: 1_700_000_000.0)
    store.put(Key("aa11", "features"), Features(embeddings=torch.ones(10, 4)))
    store.put(Key("aa11", "states@2"), States(layer=2, hidden=torch.ones(10, 4)))
    store.put(Key("bb22", "features"), Features(embeddings=torch.ones(5, 4)), ttl_s=60)
    store.close()
    return tmp_path


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["store", *arguments]) == code
    return capsys.readouterr().out


def test_ls_lists_what_is_stored(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = said(capsys, "ls", str(folder))
    assert "3 records, 400 bytes" in out
    assert "states@2" in out
    rows = [json.loads(line) for line in said(capsys, "ls", str(folder), "--json").splitlines()]
    assert [(row["identity"], row["part"], row["bytes"]) for row in rows] == [
        ("aa11", "features", 160), ("aa11", "states@2", 160), ("bb22", "features", 80),
    ]  # fmt: skip
    assert rows[0]["until"] == ""
    assert rows[2]["until"]


def test_show_tells_what_a_file_says_of_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = said(capsys, "show", str(folder), "aa", "--json").splitlines()
    features, states = map(json.loads, lines)
    assert features["tensors"] == {"embeddings": ["torch.float32", 10, 4]}
    assert (states["kind"], states["layer"]) == ("states", 2)
    assert main(["store", "show", str(folder), "cc"]) == 2
    assert "begins with 'cc'" in capsys.readouterr().err


def test_verify_names_what_is_damaged_and_says_so_by_its_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "3 good, 0 damaged, 0 missing" in said(capsys, "verify", str(folder))
    path = json.loads(said(capsys, "show", str(folder), "bb", "--json"))["file"]
    data = bytearray(Path(path).read_bytes())
    data[-1] ^= 1
    Path(path).write_bytes(data)
    out = said(capsys, "verify", str(folder), code=1)
    assert f"damaged: {path}: the checksum of block embeddings differs" in out
    assert "2 good, 1 damaged" in out
    assert json.loads(said(capsys, "verify", str(folder), "--json")) == {
        "good": 2, "damaged": {}, "unreadable": {}, "missing": [], "adopted": 0, "unfinished": 0,
    }  # fmt: skip


def test_gc_drops_what_is_over_and_what_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 records dropped; 2 left" in said(capsys, "gc", str(folder))  # its minute was in 2023
    assert "1 records dropped; 1 left, 160 bytes" in said(capsys, "gc", str(folder), "--disk-bytes", "200")


def test_a_folder_that_is_no_store_stays_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("ls", "verify", "gc"):
        assert main(["store", action, str(tmp_path)]) == 2
        assert "is no store" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_ask_keeps_what_it_computed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.txt"
    page.write_text("Once upon a time there was a store.")
    ask = ["ask", "Look: {1} Who?", "--document", str(page), "--model", "tiny:qwen2_5_vl", "--policy", "full-reuse",
           "--json", "--max-tokens", "2", "--store", str(tmp_path / "kept")]  # fmt: skip
    assert main(ask) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(ask) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["text"] == first["text"]
    assert again["usage"]["relocated_tokens"] > first["usage"]["relocated_tokens"] == 0


def test_ask_leaves_patches_for_the_next_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(f"Page {name} says that {name} is a number, and more than that.")
    ask = ["ask", "Look: {1} and {2} Who?", "--document", str(tmp_path / "one"), "--document", str(tmp_path / "two"),
           "--model", "tiny:qwen2_5_vl", "--policy", "patched:0.5", "--json", "--max-tokens", "2",
           "--store", str(tmp_path / "kept")]  # fmt: skip
    usage = []
    for _ in range(2):
        assert main(ask) == 0
        usage.append(json.loads(capsys.readouterr().out)["usage"])
    assert [one["patched_tokens"] > 0 for one in usage] == [False, True]
