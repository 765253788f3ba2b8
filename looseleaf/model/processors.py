"""Loads a checkpoint's processor, with or without torchvision.

In: a model folder or hub id. Out: the family's own processor object (`.tokenizer`, `.image_processor`,
`.apply_chat_template`, called on text and images), or the tokenizer of a text-only model. With torchvision this is
`AutoProcessor`. Without it transformers still has PIL image processors for most families but no video processors, and
processors that want one cannot be loaded: those are put together here from their parts, with a stand-in for video.
What this file does not know: prompts, models, and what its callers do about errors, which are transformers' own.
"""

from functools import cache
from pathlib import Path
from typing import Any

from transformers import PROCESSOR_MAPPING, AutoConfig, AutoImageProcessor, AutoProcessor, AutoTokenizer
from transformers.utils import is_torchvision_available

from looseleaf.model.kimi_images import KimiPilImageProcessor

_OWN_IMAGE_PROCESSORS: dict[str, Any] = {"kimi_k25": KimiPilImageProcessor}
"""Model types whose image processor transformers has for torchvision alone."""


def load_processor(path: str | Path, **hub_kwargs: Any) -> Any:
    """The processor of the checkpoint at `path`, or its tokenizer if the model sees text only.

    `hub_kwargs` (`revision`, `token`, `cache_dir`, `local_files_only`, …) go to transformers; a folder on this
    machine is never looked up on the network. A missing or broken file raises what transformers raises.
    """
    source = str(path)
    if Path(source).is_dir():
        hub_kwargs = {**hub_kwargs, "local_files_only": True}
    config = AutoConfig.from_pretrained(source, **hub_kwargs)
    processor_class = PROCESSOR_MAPPING.get(type(config), None)
    if processor_class is None:
        return AutoTokenizer.from_pretrained(source, **hub_kwargs)
    if is_torchvision_available() or "video_processor" not in processor_class.get_attributes():
        return AutoProcessor.from_pretrained(source, **hub_kwargs)
    return _assemble(processor_class, source, config.model_type, hub_kwargs)


class NoVideoProcessor:
    """Stands where a video processor would. Calling it says what is missing; everything else about images works."""

    model_input_names: tuple[str, ...] = ()
    num_frames = 64
    fps = 1
    """SmolVLM's chat template call reads both whether or not there is a video; these are its own defaults."""
    _auto_class = None
    """Read by transformers' `save_pretrained`, which would copy custom code."""

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ImportError(
            "this processor was loaded without torchvision: install it for videos, or pass frames as images"
        )


def _assemble(processor_class: Any, source: str, model_type: str, hub_kwargs: dict[str, Any]) -> Any:
    """What `processor_class.from_pretrained` does, from the parts that load without torchvision."""
    loaders: dict[str, Any] = {
        "tokenizer": AutoTokenizer.from_pretrained,
        "image_processor": _OWN_IMAGE_PROCESSORS.get(model_type, AutoImageProcessor).from_pretrained,
        "video_processor": lambda _source, **_kwargs: NoVideoProcessor(),
    }
    # The order of the parts is the order of the constructor's arguments.
    parts = [loaders[name](source, **hub_kwargs) for name in processor_class.get_attributes()]
    settings, _ = processor_class.get_processor_dict(source, **hub_kwargs)
    return _without_video(processor_class).from_args_and_dict(parts, settings)


@cache
def _without_video(processor_class: Any) -> Any:
    """`processor_class` with a constructor that takes the stand-in; every other check of its arguments stays."""

    class WithoutVideo(processor_class):
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if isinstance(argument, NoVideoProcessor):
                return NoVideoProcessor
            return super().check_argument_for_proper_class(argument_name, argument)

        def to_dict(self) -> dict[str, Any]:
            values: dict[str, Any] = super().to_dict()
            return {name: value for name, value in values.items() if not isinstance(value, NoVideoProcessor)}

    WithoutVideo.__name__ = WithoutVideo.__qualname__ = processor_class.__name__
    WithoutVideo.__module__ = processor_class.__module__
    return WithoutVideo
