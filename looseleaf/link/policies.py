"""Policies: what to compute of a prompt whose chunks may be stored. Each is a frozen dataclass; fields configure it.

A policy answers one question, `stages`: of a reused chunk of n tokens, which are computed in context, from which layer
on. Class attributes say whether it reuses chunks or prefixes at all. It sees numbers, never tensors; `link/plan.py`
turns its answers into a plan and `link/linker.py` obeys. `docs/add-a-policy.md` walks through adding one.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from looseleaf.checks import check_number, check_truth, check_whole
from looseleaf.errors import PolicyError


@dataclass(frozen=True, kw_only=True, slots=True)
class Select:
    """Rows chosen while running: the best `share` of a prompt's reused tokens by a score."""

    by: str
    """`deviation`: how far keys and values of the layer below differ from stored ones; `attention`: an oracle."""
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """From layer `layer` on, compute these offsets of a chunk (a prefix of it, or a selection)."""

    layer: int
    rows: range | Select
    from_states: bool = False
    """Enter with stored boundary states instead of going on from the layer below."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchForm:
    """What of a deficit a patch keeps: directions worth this share of the page's bytes, in layers from one on."""

    share: float
    from_layer: int


DRIFTS = ("words", "order", "fewer", "again")
"""How an antecedent may differ from the one a patch was made behind, from the least on: other words between the same
chunks, the chunks in another order, one chunk fewer, one of them twice (these with other words, too). One that is
new, or replaced, is never allowed: there a patch does harm."""


class Policy:
    """What `plan_link` asks of a policy, with the answers most give. A subclass's fields may override any of them."""

    reuses_chunks = True
    uses_prefix = False
    relocate: bool = True
    two_step: bool = False
    keys_rank: int | None = None
    patch: PatchForm | None = None
    """With a form: reused chunks get the patch stored for this very antecedent, and computed ones leave theirs."""
    drifts: tuple[str, ...] = ()
    """In which ways of DRIFTS the antecedent a patch was made behind may differ."""
    rebuild: bool = True
    """Where a chunk has no such patch: compute all in context, or do what `stages` says for that one."""
    later: bool = False
    """Whether patches that were missing are made once nobody waits, by computing the prompt again."""

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """Which of a reused chunk's tokens are computed in context, from which layer on: none."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Reprefill(Policy):
    """Compute everything: the ceiling every other policy is compared with."""

    reuses_chunks = False


@dataclass(frozen=True, kw_only=True)
class PrefixCache(Policy):
    """Compute all behind the longest equal prefix, whose exact rows are stored: what engines in use do. Exact."""

    reuses_chunks = False
    uses_prefix = True


@dataclass(frozen=True, kw_only=True)
class FullReuse(Policy):
    """Compute text only; chunks are relocated, or left at their canonical positions (Prompt Cache's form)."""

    relocate: bool = True
    two_step: bool = False
    """Compute the last token in a second pass, as systems do that cannot link in one (InfoBlend §2.2); for timing."""

    def __post_init__(self) -> None:
        check_truth("full-reuse: relocate", self.relocate, error=PolicyError)
        check_truth("full-reuse: two_step", self.two_step, error=PolicyError)


@dataclass(frozen=True, kw_only=True)
class FirstK(Policy):
    """Compute text and the first `k` tokens of each reused chunk (InfoBlend-k, EPIC, MPIC)."""

    k: int = 32
    relocate: bool = True

    def __post_init__(self) -> None:
        check_whole("first-k: k", self.k, low=0, error=PolicyError)
        check_truth("first-k: relocate", self.relocate, error=PolicyError)

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """The first k, through all layers."""
        return (Stage(layer=0, rows=range(min(self.k, tokens))),)


@dataclass(frozen=True, kw_only=True)
class Deviation(Policy):
    """Compute text and the `ratio` of reused tokens whose keys and values deviate most in layer 1 (CacheBlend)."""

    ratio: float = 0.15

    def __post_init__(self) -> None:
        check_number("deviation: ratio", self.ratio, low=0, high=1, error=PolicyError)

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """Everything through layers 0 and 1, then the selection."""
        return (
            Stage(layer=0, rows=range(tokens)),
            Stage(layer=min(2, layers), rows=Select(by="deviation", share=self.ratio)),
        )


@dataclass(frozen=True, kw_only=True)
class LayerAdaptive(Policy):
    """Compute text and a first share of each reused chunk that shrinks with depth, `ratio` on average (VLCache)."""

    ratio: float = 0.1

    def __post_init__(self) -> None:
        check_number("layer-adaptive: ratio", self.ratio, low=0, high=1, error=PolicyError)

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """A linear schedule, 2·ratio at the bottom (at most all) down to what keeps the average."""
        top = min(1.0, 2 * self.ratio) if layers > 1 else self.ratio
        bottom = 2 * self.ratio - top
        counts = [round(tokens * (top + (bottom - top) * (at / max(1, layers - 1)))) for at in range(layers)]
        return tuple(
            Stage(layer=at, rows=range(count)) for at, count in enumerate(counts) if at == 0 or count != counts[at - 1]
        )


@dataclass(frozen=True, kw_only=True)
class QueryAware(Policy):
    """Compute text and the `ratio` of reused tokens the question attends to most in a full prefill.

    An offline control (Quest-style bound): choosing costs the prefill it would save, so it makes no claim about time.
    """

    ratio: float = 0.15

    def __post_init__(self) -> None:
        check_number("query-aware: ratio", self.ratio, low=0, high=1, error=PolicyError)

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """The oracle's selection, through all layers."""
        return (Stage(layer=0, rows=Select(by="attention", share=self.ratio)),)


@dataclass(frozen=True, kw_only=True)
class LowRankKeys(Policy):
    """Keep values, rebuild keys of a full prefill from their `rank` largest directions (ShadowKV-style).

    An offline control: it asks whether a low-rank copy of the absolute keys would do what a low-rank patch does.
    """

    rank: int = 32

    def __post_init__(self) -> None:
        check_whole("low-rank-keys: rank", self.rank, low=1, error=PolicyError)

    @property
    def keys_rank(self) -> int:  # type: ignore[override]
        """Keys are rebuilt at this rank."""
        return self.rank


@dataclass(frozen=True, kw_only=True)
class DeepLayers(Policy):
    """Compute text, and reused chunks from layer `from_layer` on, starting from stored states (partial re-prefill)."""

    from_layer: int = 0

    def __post_init__(self) -> None:
        check_whole("deep-layers: from_layer", self.from_layer, low=0, error=PolicyError)

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """All tokens, from one layer on."""
        if self.from_layer >= layers:
            raise PolicyError(
                f"deep-layers: from_layer must be below the model's {layers} layers, got {self.from_layer}"
            )
        return (Stage(layer=self.from_layer, rows=range(tokens), from_states=self.from_layer > 0),)


@dataclass(frozen=True, kw_only=True)
class Patched(Policy):
    """Compute text only; chunks are relocated, and a low-rank patch restores what context adds to them (Kamera).

    `share` is the patch's part of the page's bytes; with `from_layer`, shallower layers are left as they are stored.
    A patch belongs to everything in front of its chunk; with `close` one made behind the same chunks will do, whatever
    their order and the words between them.
    """

    share: float = 0.25
    from_layer: int = 0
    close: bool = False
    rebuild: bool = True

    def __post_init__(self) -> None:
        check_number("patched: share", self.share, low=0, high=1, error=PolicyError)
        check_whole("patched: from_layer", self.from_layer, low=0, error=PolicyError)
        check_truth("patched: close", self.close, error=PolicyError)
        check_truth("patched: rebuild", self.rebuild, error=PolicyError)

    @property
    def patch(self) -> PatchForm:  # type: ignore[override]
        """Patches of this form are put on and left behind."""
        return PatchForm(share=float(self.share), from_layer=self.from_layer)

    @property
    def drifts(self) -> tuple[str, ...]:  # type: ignore[override]
        """The first two, if any."""
        return DRIFTS[:2] if self.close else ()


MODES = ("exact", "balanced", "fast")


@dataclass(frozen=True, kw_only=True)
class Auto(Policy):
    """For each chunk the best there is: rows of an equal prefix, a patch for this antecedent, one for a close one.

    Where there is none, `balanced` computes in context, exactly, and leaves a patch behind; `fast` relocates, computes
    the first `k` tokens, and makes the patch once nobody waits. `exact` uses prefixes alone and leaves patches behind.
    What is not given is taken from the model's calibration; without one patches have a quarter of the page's bytes, in
    all layers, and must have been made behind this very antecedent.
    """

    mode: str = "balanced"
    share: float | None = None
    from_layer: int | None = None
    close: str | None = None
    """Drifts allowed, joined by +: `words+order`; `none`."""
    k: int = 32

    uses_prefix = True

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PolicyError(f"auto: mode must be {', '.join(MODES[:-1])} or {MODES[-1]}, got {self.mode!r}")
        check_number("auto: share", 0.25 if self.share is None else self.share, low=0, high=1, error=PolicyError)
        check_whole("auto: from_layer", self.from_layer or 0, low=0, error=PolicyError)
        check_whole("auto: k", self.k, low=0, error=PolicyError)
        if not isinstance(self.close, str | None) or not set(self.drifts) <= set(DRIFTS):
            raise PolicyError(f"auto: close joins some of {', '.join(DRIFTS)} by +, or is none; got {self.close!r}")

    @property
    def reuses_chunks(self) -> bool:  # type: ignore[override]
        """Unless every row must be exact."""
        return self.mode != "exact"

    @property
    def patch(self) -> PatchForm:  # type: ignore[override]
        """Patches of this form are put on and left behind."""
        return PatchForm(share=0.25 if self.share is None else float(self.share), from_layer=self.from_layer or 0)

    @property
    def drifts(self) -> tuple[str, ...]:  # type: ignore[override]
        """In the order of preference."""
        given = [] if self.close in (None, "", "none") else str(self.close).split("+")
        return tuple(sorted(given, key=lambda one: DRIFTS.index(one) if one in DRIFTS else -1))

    @property
    def rebuild(self) -> bool:  # type: ignore[override]
        """Unless somebody is in a hurry."""
        return self.mode != "fast"

    @property
    def later(self) -> bool:  # type: ignore[override]
        """What a hurried request did not compute is made up for."""
        return self.mode == "fast"

    def stages(self, tokens: int, layers: int) -> tuple[Stage, ...]:
        """Of a chunk without a patch: the first k."""
        return (Stage(layer=0, rows=range(min(self.k, tokens))),)


def _kebab(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


POLICIES: dict[str, type[Policy]] = {
    _kebab(one.__name__): one
    for one in (
        Reprefill, PrefixCache, FullReuse, FirstK, Deviation, LayerAdaptive, QueryAware, LowRankKeys, DeepLayers,
        Patched, Auto,
    )
}  # fmt: skip
"""By the name used on the command line and over HTTP."""


def policy_name(policy: Policy) -> str:
    """The name a policy goes by outside Python, with its first field and what differs from the default."""
    name = _kebab(type(policy).__name__)
    fields = dataclasses.fields(policy)  # type: ignore[arg-type]
    told = [
        f"{one.name}={getattr(policy, one.name)}".lower()
        for at, one in enumerate(fields)
        if at == 0 or getattr(policy, one.name) != one.default
    ]
    return name + (":" + ",".join(told) if told else "")


def parse_policy(text: str) -> Policy:
    """`first-k:32`, `first-k:k=32,relocate=false`, `prefix-cache` → a policy."""
    name, _, rest = text.partition(":")
    kind = POLICIES.get(name.strip())
    if kind is None:
        raise PolicyError(f"unknown policy {name!r}; there are {', '.join(POLICIES)}")
    fields = {one.name: one for one in dataclasses.fields(kind)}  # type: ignore[arg-type]
    given: dict[str, Any] = {}
    for at, part in enumerate(filter(None, map(str.strip, rest.split(",")))):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals:
            key, value = (list(fields)[at] if at < len(fields) else part), part
        if key not in fields:
            known = ", ".join(fields) or "no fields"
            raise PolicyError(f"{name} has no field {key!r}; it has {known}")
        if key in given:
            raise PolicyError(f"{name}: {key} is given twice")
        given[key] = _parse_value(name, key, str(fields[key].type), value)
    return kind(**given)


def _parse_value(policy: str, key: str, kind: str, value: str) -> Any:
    try:
        kind = kind.removesuffix(" | None")
        if kind == "str":
            return value
        if kind == "bool":
            return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[value.lower()]
        return int(value) if kind == "int" else float(value)
    except (KeyError, ValueError):
        raise PolicyError(f"{policy}: {key} must be a {kind}, got {value!r}") from None
