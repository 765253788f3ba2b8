"""looseleaf: a vision-language model looks at an image once and uses what it computed anywhere."""

from looseleaf.config import Config
from looseleaf.engine.request import Answer, Progress, Sampling, Usage
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.errors import (
    CancelledError,
    ClosedError,
    ConfigError,
    LimitError,
    LooseleafError,
    MediaError,
    ModelError,
    ModelLoadError,
    PolicyError,
    PromptError,
    QueueFullError,
    UnsupportedModelError,
)  # fmt: skip
from looseleaf.link.plan import Plan
from looseleaf.link.policies import (
    Auto,
    DeepLayers,
    Deviation,
    FirstK,
    FullReuse,
    LayerAdaptive,
    LowRankKeys,
    Patched,
    Policy,
    PrefixCache,
    QueryAware,
    Reprefill,
    parse_policy,
)  # fmt: skip
from looseleaf.prompt.media import MediaLimits
from looseleaf.prompt.segments import Clip, Document, Image, Message
from looseleaf.system import Looseleaf, Reply
from looseleaf.version import VERSION
from looseleaf.window import Window

__version__ = VERSION

__all__ = [
    "Answer", "Auto", "CancelledError", "Clip", "ClosedError", "Config", "ConfigError", "DeepLayers", "Deviation",
    "Document", "EngineConfig", "FirstK", "FullReuse", "Image", "LayerAdaptive", "LimitError", "Looseleaf",
    "LooseleafError", "LowRankKeys", "MediaError", "MediaLimits", "Message", "ModelError", "ModelLoadError",
    "Patched", "Plan", "Policy", "PolicyError", "PrefixCache", "Progress", "PromptError", "QueryAware",
    "QueueFullError", "Reply", "Reprefill", "Sampling", "UnsupportedModelError", "Usage", "Window", "parse_policy",
]  # fmt: skip
