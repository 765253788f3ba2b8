"""Everything that can be set, in one frozen tree. Unknown keys are errors, values are checked where they are born."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from looseleaf.checks import check_number, check_whole
from looseleaf.engine.scheduler import EngineConfig
from looseleaf.errors import ConfigError
from looseleaf.link.policies import Policy, PrefixCache
from looseleaf.prompt.build import CANONICALS
from looseleaf.prompt.media import MediaLimits
from looseleaf.store.opening import MEMORY, folder_of


@dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a Looseleaf instance."""

    policy: Policy = field(default_factory=PrefixCache)
    """Used when a request names none. The default is exact."""
    canonical: str = "preamble"
    """What chunks are computed behind: the chat template's fixed preamble, or `none`."""
    store: str = MEMORY
    """Where records are kept: `memory://`, or a folder, which survives restarts, with memory in front of it."""
    store_bytes: int = 4 * 2**30
    """Budget of the store in memory: chunk records, features and prefixes together."""
    disk_bytes: int = 64 * 2**30
    """Budget of the folder, if there is one."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    media: MediaLimits = field(default_factory=MediaLimits)
    audit: float = 0.0
    """Share of the answers on approximate rows that are compared with re-prefill when nobody waits."""
    calibration: Path | None = None
    """What `looseleaf calibrate` wrote; None: looked for beside the model and in the user's cache."""

    def __post_init__(self) -> None:
        check_whole("store_bytes", self.store_bytes, low=0)
        check_whole("disk_bytes", self.disk_bytes, low=0)
        if not isinstance(self.store, str):
            raise ConfigError(f"store is {MEMORY!r} or the path of a folder, got {self.store!r}")
        if self.store != MEMORY:
            folder_of(self.store)
        check_number("audit", self.audit, low=0, high=1)
        if not isinstance(self.calibration, Path | None):
            raise ConfigError(f"calibration is a Path, got {self.calibration!r}")
        if self.canonical not in CANONICALS:
            raise ConfigError(f"canonical must be {' or '.join(map(repr, CANONICALS))}, got {self.canonical!r}")
        if not isinstance(self.policy, Policy):
            raise ConfigError(f"policy must be a Policy (parse_policy makes one of a name), got {self.policy!r}")
