"""Settings: the checked arguments of a manager."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TypedDict

import msgspec

from quire.config import nearest
from quire.core.groups import LayerGroup, check_count, check_groups
from quire.core.order import Clock
from quire.core.policies import POLICIES, PolicyFactory
from quire.errors import ConfigError

MAX_SECONDS = 1e9
"""The longest retention or time to live: about 31 years."""


class Options(TypedDict, total=False):
    """Options of `CacheManager`, explained there."""

    policy: str | PolicyFactory
    sub_block: bool
    pin_budget: float
    debug: bool
    clock: Clock | None


class ManagerSettings(msgspec.Struct, frozen=True):
    """The arguments of `CacheManager`, checked. Raises `ConfigError`."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    policy: str | PolicyFactory = "lru"
    sub_block: bool = True
    pin_budget: float = 0.5
    debug: bool = False
    clock: Clock | None = None

    def __post_init__(self) -> None:
        check_groups(self.groups)
        check_count("block_size", self.block_size, limit=2**20)
        factory_of(self.policy)
        for name, value in (("sub_block", self.sub_block), ("debug", self.debug)):
            if type(value) is not bool:
                raise ConfigError(f"{name} is True or False, got {value!r}")
        if self.clock is not None and not callable(self.clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {self.clock!r}")
        if type(self.pin_budget) not in (int, float) or not 0 <= self.pin_budget <= 1:
            raise ConfigError(f"pin_budget is a share from 0 to 1, got {self.pin_budget!r}")

    @property
    def policy_name(self) -> str:
        """The policy's name, for people."""
        if isinstance(self.policy, str):
            return self.policy
        return getattr(self.policy, "__name__", type(self.policy).__name__)

    def check_duration(self, name: str, seconds: float | None) -> float:
        """Return a duration in seconds, 0 for None; raise `ConfigError` if it cannot work."""
        if seconds is None:
            return 0.0
        if type(seconds) not in (int, float) or not 0 < seconds <= MAX_SECONDS:
            msg = f"{name} must be a number of seconds, above 0 and up to {MAX_SECONDS:g}"
            raise ConfigError(f"{msg}, got {seconds!r}")
        if self.clock is None:
            msg = f"{name}={seconds} needs a clock: CacheManager(..., clock=time.monotonic)"
            raise ConfigError(msg)
        return seconds


def factory_of(policy: str | PolicyFactory) -> PolicyFactory:
    """Return the factory of a policy that is given by name or as one; raise `ConfigError`."""
    if callable(policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:  # pyright: ignore[reportUnnecessaryIsInstance]
        msg = f"unknown policy {policy!r}; there are {', '.join(sorted(POLICIES))}"
        raise ConfigError(msg)
    return POLICIES[policy]


def settings_of(groups: Items[LayerGroup], block_size: int, options: Options) -> ManagerSettings:
    """Return the settings of a manager; raise `ConfigError`, also for an option that there is not."""
    for name in options:
        if name not in Options.__annotations__:
            known = {"num_blocks", "block_size", "groups", "watchers", *Options.__annotations__}
            raise ConfigError(f"CacheManager has no option {name!r}{nearest(name, known)}")
    return ManagerSettings(tuple(groups), block_size, **options)
