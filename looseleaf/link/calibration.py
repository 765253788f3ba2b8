"""Calibration: what was measured of a model before its rows are reused, and what follows for `Auto`.

`looseleaf calibrate MODEL` writes one; opening the model finds it beside the model or in the user's cache. It belongs
to one model, dtype and canonical context: for any other it is not there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from looseleaf.errors import ConfigError, PolicyError
from looseleaf.link.policies import Auto, FirstK, FullReuse, Patched, Policy

log = logging.getLogger(__name__)

VERSION = 1
"""Of the file: others are not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What one way of reuse loses against computing everything, over the same questions."""

    n: int
    kl: float
    """Nats an answered token."""
    changed: int
    """Answers that are another's, and were not undecided."""
    flips: int
    """Answers that blind reuse changes."""
    restored: int
    """Of those, how many are as they were."""
    eta: float | None
    """Share of blind reuse's KL that is closed; None where that loses nothing."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, and what follows."""

    model: str
    fingerprint: str
    dtype: str
    canonical: str
    seed: int
    commit: str
    noise_kl: float
    """Of computing everything twice: what rounding alone gives."""
    ways: Mapping[str, Loss]
    """Policies and patches of the prompt's own antecedent."""
    drifts: Mapping[str, Loss]
    """Patches of an antecedent that differs, by how it does."""
    survivors: Loss | None
    """Rows kept as they were computed behind a chunk that is gone, against a prompt that never had it."""
    share: float
    from_layer: int
    close: str
    removal: bool
    """Whether survivors need patches that take the gone chunk out of them."""

    def tune(self, policy: Policy) -> Policy:
        """An `Auto` with what it leaves open as measured; any other policy as it is."""
        if not isinstance(policy, Auto):
            return policy
        return replace(
            policy,
            share=self.share if policy.share is None else policy.share,
            from_layer=self.from_layer if policy.from_layer is None else policy.from_layer,
            close=self.close if policy.close is None else policy.close,
        )

    def covers(self, policy: Policy) -> bool:
        """Whether what a policy does is among what was measured."""
        if isinstance(policy, Auto):
            form, close = policy.patch, set(self.close.split("+"))
            return (form.share, form.from_layer) == (self.share, self.from_layer) and set(policy.drifts) <= close
        if isinstance(policy, Patched):
            return f"patch {policy.share:.0%}" in self.ways and policy.from_layer == 0 and not policy.close
        return policy in (FullReuse(), FirstK(k=32)) or not policy.reuses_chunks

    def fits(self, fingerprint: str, dtype: str, canonical: str) -> bool:
        """Whether it was measured on this."""
        return (self.fingerprint, self.dtype, self.canonical) == (fingerprint, dtype, canonical)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        waiting = path.with_name(f"{path.name}.new")
        waiting.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n", encoding="utf-8")
        waiting.replace(path)


def read_calibration(path: Path) -> Calibration:
    """A saved one; raises ConfigError when it is not."""
    try:
        given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if given.pop("version") != VERSION:
            raise ConfigError(f"{path} is a calibration of another version; run `looseleaf calibrate` again")
        for name in ("ways", "drifts"):
            given[name] = {way: Loss(**loss) for way, loss in given[name].items()}
        given["survivors"] = Loss(**given["survivors"]) if given["survivors"] else None
        found = Calibration(**given)
        Auto(share=found.share, from_layer=found.from_layer, close=found.close)  # raises where it is no policy
        return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError, PolicyError) as error:
        raise ConfigError(f"{path} is not a calibration: {error!r}") from error


def file_name(dtype: str) -> str:
    """What a calibration beside its model is called."""
    return f"calibration-{dtype}.json"


def cached_at(fingerprint: str, dtype: str, canonical: str) -> Path:
    """Where `looseleaf calibrate` leaves it unless told otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "looseleaf" / "calibrations" / f"{fingerprint[:32]}-{canonical[:8]}-{dtype}.json"


def find_calibration(
    folder: Path, fingerprint: str, dtype: str, canonical: str, *, given: Path | None = None
) -> Calibration | None:
    """The one that was named, which must fit, or one beside the model or in the cache that does."""
    if given is not None:
        found = read_calibration(given)
        if not found.fits(fingerprint, dtype, canonical):
            raise ConfigError(
                f"{given} was measured on {found.model} in {found.dtype}, not on this model, dtype and canonical "
                f"context; run `looseleaf calibrate` for it"
            )
        return found
    for path in (cached_at(fingerprint, dtype, canonical), folder / file_name(dtype)):
        if not path.is_file():
            continue
        try:
            found = read_calibration(path)
        except ConfigError as error:
            log.warning("%s", error)
            continue
        if found.fits(fingerprint, dtype, canonical):
            return found
    return None
