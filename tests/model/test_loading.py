"""Opening models: what goes wrong says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from looseleaf import ConfigError, Looseleaf, ModelLoadError, UnsupportedModelError
from looseleaf.model.adapter import Adapter
from looseleaf.model.loading import load_adapter
from looseleaf.model.tiny import build_tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return build_tiny("qwen2_5_vl", tmp_path / "model")


def test_a_folder_opens_and_is_named_after_itself(folder: Path) -> None:
    with Looseleaf.open(folder, dtype="bfloat16", max_length=512) as ll:
        assert ll.adapter.name == "model"
        assert ll.adapter.max_length == 512
        assert str(ll.adapter.layout.dtype) == "torch.bfloat16"


def test_a_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        load_adapter(tmp_path / "nowhere")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_missing_file_is_an_error_about_the_folder(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    if missing == "tokenizer.json":
        (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelLoadError, match="model"):
        load_adapter(folder)


def test_damaged_weights_are_an_error_about_the_folder(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(ModelLoadError, match="model"):
        load_adapter(folder)


def test_a_windowed_model_is_refused_before_its_weights_are_read(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    layers = config["text_config"]["num_hidden_layers"]
    config["text_config"] |= {
        "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0,
        "layer_types": ["sliding_attention"] * layers,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="sliding_attention"):
        load_adapter(folder, max_length=1000)


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ModelLoadError, match="qwen2_5_vl"):
        Looseleaf.open("tiny:gpt9")
    with pytest.raises(ConfigError, match="bfloat16"):
        Looseleaf.open("tiny:llama", dtype="int3")
    with pytest.raises(ConfigError, match="max_length"):
        Looseleaf.open("tiny:llama", max_length=0)


def test_fingerprints_tell_models_dtypes_and_weights_apart(
    adapter_of: Callable[..., Adapter], folder: Path, tmp_path: Path
) -> None:
    same, again = adapter_of("qwen2_5_vl"), load_adapter(folder)
    other_seed = load_adapter(build_tiny("qwen2_5_vl", tmp_path / "other", seed=1))
    prints = {
        again.fingerprint, other_seed.fingerprint, adapter_of("qwen2_5_vl", "bfloat16").fingerprint,
        adapter_of("qwen3_vl").fingerprint,
    }  # fmt: skip
    assert same.fingerprint == again.fingerprint
    assert len(prints) == 4


def test_an_unlisted_family_is_checked_on_an_image_and_served(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("looseleaf.model.family.FAMILIES", {})
    with Looseleaf.open(folder) as ll:
        assert not ll.adapter.family.known
        assert ll.linker.counters.vision_calls == 1
