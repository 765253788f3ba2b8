"""Every error looseleaf raises on purpose.

    LooseleafError                500  something of ours
    ├── ConfigError               400  a setting or argument is wrong
    │   └── PolicyError           400  unknown policy, or a policy field out of range
    ├── ModelError                500
    │   ├── ModelLoadError        404  wrong path, missing or unreadable file
    │   └── UnsupportedModelError 422  the model has a part whose reuse would be silently wrong
    ├── PromptError               400  the prompt cannot be understood
    │   ├── MediaError            400  an image, clip or document cannot be read
    │   └── LimitError            413  too many pixels, bytes or tokens
    ├── QueueFullError            429  come back later
    ├── CancelledError            499  the caller cancelled the request
    └── ClosedError               503  the engine was closed

Messages say what was given, what was expected and what to do. `status` is the HTTP status a server answers with.
A cache fault is never an error: it costs time and is counted.
"""

from __future__ import annotations


class LooseleafError(Exception):
    """The root: catch this to catch everything looseleaf raises on purpose."""

    status = 500


class ConfigError(LooseleafError):
    """A setting or an argument is out of range, unknown or contradicts another."""

    status = 400


class PolicyError(ConfigError):
    """The policy is unknown or one of its fields is wrong."""


class ModelError(LooseleafError):
    """Something is wrong with the model itself."""


class ModelLoadError(ModelError):
    """The model could not be found or read."""

    status = 404


class UnsupportedModelError(ModelError):
    """The model has a part (mask, layer type, attention argument, rotary) that reuse would get silently wrong."""

    status = 422


class PromptError(LooseleafError):
    """The prompt cannot be understood."""

    status = 400


class MediaError(PromptError):
    """An image, clip or document cannot be read."""


class LimitError(PromptError):
    """Too many pixels, bytes or tokens."""

    status = 413


class QueueFullError(LooseleafError):
    """The waiting line is full; the request was not taken."""

    status = 429


class CancelledError(LooseleafError):
    """The request was cancelled by its caller."""

    status = 499


class ClosedError(LooseleafError):
    """The engine was closed."""

    status = 503
