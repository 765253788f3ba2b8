import shutil
from pathlib import Path

import pytest

import looseleaf.model.embedded as embedded
from looseleaf import Looseleaf
from looseleaf.errors import ModelLoadError
from looseleaf.model.tiny import build_tiny


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = build_tiny("qwen2_5_vl", tmp_path / "small")
    embedded.seal(folder)
    monkeypatch.setattr(embedded, "FOLDER", tmp_path)
    return folder


def test_an_embedded_model_opens_by_its_name(released: Path):
    with Looseleaf.open("embedded:small") as ll:
        assert ll.ask(["Hello"], max_tokens=2).usage.fresh_tokens


def test_a_changed_weight_file_is_noticed(released: Path):
    weights = released / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors changed"):
        Looseleaf.open("embedded:small")


def test_a_lost_or_added_file_is_noticed(released: Path):
    shutil.copyfile(released / "config.json", released / "more.json")
    (released / "generation_config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"generation_config.json, more.json changed"):
        Looseleaf.open("embedded:small")


def test_an_unknown_name_lists_what_there_is(released: Path):
    with pytest.raises(ModelLoadError, match="no embedded model 'large'; there are small"):
        Looseleaf.open("embedded:large")
