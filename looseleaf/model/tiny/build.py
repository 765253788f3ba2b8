"""Writes one family's folder: config, weights, tokenizer, processor files and chat template.

In: a family's name, a folder, a seed. Out: a folder that plain `from_pretrained` loads, byte for byte the same for
the same seed. Nothing is downloaded. What this file does not know: what the families look like (families.py) and
how weights are drawn (weights.py).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

from looseleaf.errors import ConfigError
from looseleaf.model.tiny.configs import Config
from looseleaf.model.tiny.families import FAMILY, Family
from looseleaf.model.tiny.vocabulary import build_tokenizer
from looseleaf.model.tiny.weights import draw_weights

FAMILIES: tuple[str, ...] = tuple(FAMILY)
"""Every family `build_tiny` knows; the last two see text only."""


def build_tiny(family: str, folder: Path, *, seed: int = 0, overrides: Mapping[str, Any] | None = None) -> Path:
    """Write a random-weight model of `family` into `folder`, made if missing, and return it.

    `overrides` changes config values by dotted key before the model is built, such as
    `{"text_config.num_hidden_layers": 30}`. A mapping is merged into the one it names, so that
    `{"text_config.rope_parameters": {"rope_type": "linear", "factor": 4.0}}` keeps theta and M-RoPE sections. For the
    text-only families `text_config.` stands for the config itself. Tokenizer and image settings are not touched.
    """
    if family not in FAMILY:
        raise ConfigError(f"unknown family {family!r}: expected one of {', '.join(FAMILIES)}")
    recipe = FAMILY[family]
    tokenizer = build_tokenizer(recipe.vocabulary)
    special_ids = sorted(tokenizer.added_tokens_decoder)
    return write_folder(
        recipe,
        folder,
        tokenizer=tokenizer,
        draw=lambda model: draw_weights(model, seed=seed, special_ids=special_ids),
        overrides=overrides or {},
    )


def tiny_config(family: str, overrides: Mapping[str, Any]) -> Any:
    """A family's config with other values, as in `build_tiny`, for a model that is never written."""
    recipe = FAMILY[family]
    return _make_config(recipe, recipe.config(build_tokenizer(recipe.vocabulary)), overrides)


def write_folder(
    recipe: Family, folder: Path, *, tokenizer: Any, draw: Callable[[Any], None], overrides: Mapping[str, Any]
) -> Path:
    """Write a model of `recipe` around `tokenizer`, its fp32 weights set by `draw`; `overrides` as in `build_tiny`."""
    config = _make_config(recipe, recipe.config(tokenizer), overrides)
    model = _make_model(recipe, config)
    draw(model)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=False,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.chat_template = recipe.template
    tokenizer.save_pretrained(folder)
    _write_json(folder / "processor_config.json", recipe.processor)
    _write_json(folder / "preprocessor_config.json", recipe.image_processor)
    _write_json(folder / "video_preprocessor_config.json", recipe.video_processor)
    return folder


def _make_config(recipe: Family, values: Config, overrides: Mapping[str, Any]) -> Any:
    known = AutoConfig.for_model(recipe.model_type, **_copied(values))
    for key, value in overrides.items():
        path = key.split(".")
        if not recipe.sees_images and path[0] == "text_config":
            path = path[1:]
        _check_known(known, path, key)
        _override(values, path, value)
    return AutoConfig.for_model(recipe.model_type, **_copied(values), dtype="float32")


def _check_known(config: Any, path: list[str], key: str) -> None:
    for name in path:
        if not hasattr(config, name):
            raise ConfigError(f"override {key!r}: {type(config).__name__} has no {name!r}")
        config = getattr(config, name)


def _override(values: Config, path: list[str], value: Any) -> None:
    for name in path[:-1]:
        values = values.setdefault(name, {})
    old = values.get(path[-1])
    values[path[-1]] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value


def _copied(values: Config) -> Config:
    """Config classes write into the mappings they are given."""
    return {key: _copied(value) if isinstance(value, dict) else value for key, value in values.items()}


def _make_model(recipe: Family, config: Any) -> Any:
    auto: Any = AutoModelForImageTextToText if recipe.sees_images else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        return auto.from_config(config, dtype=torch.float32).eval()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    if content:
        path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
