"""Settings: the checked arguments of a manager."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TypedDict

import msgspec

from quire.config import check_count, check_number, nearest
from quire.core.blocks import BlockPool
from quire.core.groups import LayerGroup, check_groups
from quire.core.policies import factory_of
from quire.core.policy import Clock, PolicyFactory
from quire.errors import ConfigError


class Options(TypedDict, total=False):
    """Options of `CacheManager`, explained there."""

    sub_block: bool
    pin_budget: float
    pool: type[BlockPool]
    clock: Clock | None


class ManagerSettings(msgspec.Struct, frozen=True):
    """The arguments of `CacheManager`, checked, with the policy as a factory. Raises `ConfigError`."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    policy: PolicyFactory
    policy_name: str
    sub_block: bool = True
    pin_budget: float = 0.5
    pool: type[BlockPool] = BlockPool
    clock: Clock | None = None

    def __post_init__(self) -> None:
        check_groups(self.groups)
        check_count("block_size", self.block_size, limit=2**20)
        if type(self.sub_block) is not bool:
            raise ConfigError(f"sub_block is True or False, got {self.sub_block!r}")
        if not isinstance(self.pool, type) or not issubclass(self.pool, BlockPool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"pool is a class, quire.ops.CheckedPool for instance, got {self.pool!r}"
            )
        if self.clock is not None and not callable(self.clock):
            raise ConfigError(f"clock must be a function that returns seconds, got {self.clock!r}")
        check_number("pin_budget, a share,", self.pin_budget, 0, 1)


def settings_of(
    groups: Items[LayerGroup], block_size: int, policy: str | PolicyFactory, options: Options
) -> ManagerSettings:
    """Return the settings of a manager; raise `ConfigError`, also for an option that there is not."""
    for name in options:
        if name not in Options.__annotations__:
            known = {*ManagerSettings.__struct_fields__, "num_blocks", "watchers"} - {"policy_name"}
            raise ConfigError(f"CacheManager has no option {name!r}{nearest(name, known)}")
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", type(policy).__name__)
    return ManagerSettings(tuple(groups), block_size, factory_of(policy), name, **options)
