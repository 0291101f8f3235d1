"""Tiers: where KV lives that outlives the pool, the process and the machine. Bytes, no tensors.

`Host`, `Disk`, `Files`, `Redis`, `Objects`, `Mooncake`   places for records
`TierStack`, `StackSettings`, `TierSettings`   several of them as one, and what they can be told
`TierKey`   secrets that sign records, so that nobody else's are accepted
`open_tier`   a tier from a line of text, as on the command line
`Faulty`, `FaultPlan`   any tier with faults from a seed, for tests
`Tier`, `Outcome`   what a tier of your own is made of; `quire.tiers.contract.every` tests it

Each name is loaded, with the library that it stands on, when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.tiers.base import Outcome, Tier
    from quire.tiers.disk import Disk
    from quire.tiers.faults import FaultPlan, Faulty
    from quire.tiers.files import Files
    from quire.tiers.host import Host
    from quire.tiers.keys import TierKey
    from quire.tiers.mooncake import Mooncake
    from quire.tiers.objects import Objects
    from quire.tiers.opening import open_tier
    from quire.tiers.redis import Redis
    from quire.tiers.stack import StackSettings, TierSettings, TierStack

_HOME = {
    "Disk": "disk",
    "FaultPlan": "faults",
    "Faulty": "faults",
    "Files": "files",
    "Host": "host",
    "Mooncake": "mooncake",
    "Objects": "objects",
    "Outcome": "base",
    "Redis": "redis",
    "StackSettings": "stack",
    "Tier": "base",
    "TierKey": "keys",
    "TierSettings": "stack",
    "TierStack": "stack",
    "open_tier": "opening",
}

_EXTRA = {"Redis": "redis", "Objects": "objects", "Mooncake": "mooncake"}
"""The extras of what needs more than the others do, `tiers`."""

__all__ = [
    "Disk",
    "FaultPlan",
    "Faulty",
    "Files",
    "Host",
    "Mooncake",
    "Objects",
    "Outcome",
    "Redis",
    "StackSettings",
    "Tier",
    "TierKey",
    "TierSettings",
    "TierStack",
    "open_tier",
]


def __getattr__(name: str) -> object:
    """Load a public name from the module it lives in."""
    if name not in _HOME:
        raise AttributeError(f"module 'quire.tiers' has no attribute {name!r}")
    try:
        return getattr(import_module(f"quire.tiers.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "quire":
            raise
        from quire.extras import lacking  # noqa: PLC0415 - where it is needed

        msg = lacking(f"quire.tiers.{name}", str(error.name), _EXTRA.get(name, "tiers"))
        raise ModuleNotFoundError(msg, name=error.name) from error


def __dir__() -> list[str]:
    return __all__
