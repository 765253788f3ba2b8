import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForImageTextToText

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


def test_released_models_load_plainly_and_fit_in_the_package():
    assert embedded.embedded_models()
    folders = [embedded.embedded_folder(name) for name in embedded.embedded_models()]
    assert sum((folder / "model.safetensors").stat().st_size for folder in folders) <= 120e6
    for folder in folders:
        _, found = AutoModelForImageTextToText.from_pretrained(folder, local_files_only=True, output_loading_info=True)
        assert not any(found.values()), (folder.name, found)


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
