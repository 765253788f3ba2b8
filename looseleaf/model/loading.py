"""Opening a model: a folder, a hub id, `embedded:` or `tiny:` and a name → an Adapter, checked before it serves.

transformers does the loading (safetensors, dtype, device map, revision); this file says clearly what went wrong when it
cannot, and refuses what `model/probe.py` refuses.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from looseleaf.errors import ConfigError, ModelLoadError
from looseleaf.model.adapter import Adapter
from looseleaf.model.embedded import embedded_folder
from looseleaf.model.family import family_of
from looseleaf.model.probe import build_decoder, check_config
from looseleaf.model.processors import load_processor
from looseleaf.model.tiny import FAMILIES as TINY
from looseleaf.model.tiny import build_tiny

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_adapter(
    source: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    device_map: Any = None,
    max_length: int | None = None,
    tell: Callable[[str], None] = lambda stage: None,
) -> Adapter:
    """Load a model and its processor, probe it and wrap it. `tell` hears what is being done."""
    if str(source).startswith("tiny:"):
        family = str(source).removeprefix("tiny:")
        if family not in TINY:
            raise ModelLoadError(f"there is no tiny model {family!r}; there are {', '.join(TINY)}")
        with tempfile.TemporaryDirectory() as folder:
            path = build_tiny(family, Path(folder) / family)
            return load_adapter(path, device=device, dtype=dtype, max_length=max_length, tell=tell)
    if str(source).startswith("embedded:"):
        source = embedded_folder(str(source).removeprefix("embedded:"))
    name = str(source)
    chosen = _dtype(dtype)
    hub = {} if revision is None else {"revision": revision}
    local = Path(name).exists()
    if local:
        hub["local_files_only"] = True  # type: ignore[assignment]
    tell("reading the configuration")
    config = _try(name, local, lambda: AutoConfig.from_pretrained(name, **hub))
    text = config.get_text_config()
    limit = _limit(text, max_length)
    check_config(text, limit)
    tell("loading weights")
    auto: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    wanted = {"dtype": chosen if chosen is not None else "auto", "attn_implementation": "sdpa", **hub}
    if device_map is not None:
        wanted["device_map"] = device_map
    model = _try(name, local, lambda: auto.from_pretrained(name, **wanted)).eval()
    if device_map is None:
        model = _to_device(model, device)
    processor = _try(name, local, lambda: load_processor(name, **hub))
    if not getattr(processor, "tokenizer", processor)("a")["input_ids"]:
        raise ModelLoadError(
            f"{name!r} has no vocabulary: its tokenizer turns text into nothing; is tokenizer.json there?"
        )
    tell("checking the model")
    decoder = build_decoder(model)
    return Adapter(model, processor, decoder, family_of(config.model_type), name=Path(name).name, max_length=limit)


def _to_device(model: Any, device: str | torch.device) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        first = str(error).splitlines()[0]
        raise ConfigError(f"device {str(device)!r} cannot be used: {first}") from error


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype is one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def _limit(text: Any, max_length: int | None) -> int:
    own = int(getattr(text, "max_position_embeddings", 0) or 0)
    if max_length is None:
        window = getattr(text, "sliding_window", None)
        return min(own, window) if window and "sliding_attention" in (getattr(text, "layer_types", None) or ()) else own
    if max_length < 1 or (own and max_length > own):
        raise ConfigError(f"max_length must be between 1 and the model's {own:,}, got {max_length}")
    return max_length


def _try(name: str, local: bool, load: Callable[[], Any]) -> Any:
    """Transformers' many ways to fail, as one error that says what to do."""
    try:
        return load()
    except Exception as error:  # safetensors, tokenizers, the hub client: each has errors of its own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        where = (
            f"{name!r} is not a complete model folder"
            if local
            else f"{name!r} is neither a folder here nor a model the hub gave us"
        )
        raise ModelLoadError(
            f"{where}: {first} (a model folder has config.json, safetensors weights and tokenizer files)"
        ) from error
