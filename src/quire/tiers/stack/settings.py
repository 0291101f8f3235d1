"""Settings of a stack of tiers, with their units and defaults."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

import msgspec

from quire.config import parse_bytes
from quire.errors import ConfigError
from quire.tiers.keys import TierKey

Write: TypeAlias = Literal["through", "back", "second_use"]
"""When records are written to a tier.

`through`     as soon as they are computed
`back`        when the level above lets them go: the device's eviction, or a faster tier's
`second_use`  as `through`, but not before the block was asked for a second time
"""

Size: TypeAlias = int | str


class _Checked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields named `_s` are seconds above 0, `_share` of something, `_bytes` sizes as `quire.config` reads them.

    Raises `ConfigError` for a value of another type or beyond its limits.
    """

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(type(self)):
            name, value = field.name, getattr(self, field.name)
            try:
                msgspec.convert(value, field.type)
            except msgspec.ValidationError as error:
                raise ConfigError(f"{name} cannot be {value!r}: {error}") from None
            if value is None:
                continue
            if name.endswith("_bytes"):
                msgspec.structs.force_setattr(self, name, parse_bytes(value))
            elif name.endswith("_s") and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{name} is seconds above 0, got {value}")
            elif name.endswith("_share") and not 0 < value <= 1:
                raise ConfigError(f"{name} is a share above 0 and up to 1, got {value}")
            elif isinstance(value, int) and not 1 <= value <= 1_000_000 and value is not False:
                raise ConfigError(f"{name} is from 1 to 1,000,000, got {value}")


class TierSettings(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one tier; `None` is the stack's.

    `threads`          loads that this tier works on at once
    """

    write: Write | None = None
    read_only: bool | None = None
    lookup_timeout_s: float | None = None
    load_timeout_s: float | None = None
    queue_bytes: Size | None = None
    threads: int | None = None


class StackSettings(_Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a stack: writing, reading, waiting, giving up.

    `write`               when records are written, see `Write`
    `read_only`           nothing is written, promoted or demoted
    `promote`             what a slower tier gave is kept in the fastest one as well
    `gate`                load only what beats recomputing
    `lookup_timeout_s`    the longest that `find` waits, for all tiers together
    `load_timeout_s`      the longest that `load` waits, for all tiers together
    `close_timeout_s`     the longest that `close` waits for what is still to be written; a warning says what was not
    `queue_bytes`         records that wait for one tier; what exceeds it is not stored
    `busy_share`          share of wall time that copying out of pools in host memory may take, plus the time that hits
                          have saved. Blocks beyond this are not stored. 1: no limit
    `batch_bytes`         the most that one call to a tier loads or stores
    `threads`             loads that one tier works on at once; each tier has one more for stores
    `failures`            consecutive calls that time out or fail until a tier is left alone; one that hangs is at once
    `cool_down_s`         how long it is left alone at first; it doubles, up to 64 times as long
    `strict`              a tier that cannot be opened is an error; else it is left alone until it can be
    `key`                 signs what is stored; nothing that none of its secrets signed is accepted. None: no record is
                          signed, and all are read. As text it is given by the path of its file alone, `key_file`
    `tiers`               what differs for one tier, by its name
    """

    write: Write = "through"
    read_only: bool = False
    promote: bool = True
    gate: bool = True
    lookup_timeout_s: float = 0.25
    load_timeout_s: float = 5.0
    close_timeout_s: float = 1.0
    queue_bytes: Size = "256MiB"
    busy_share: float = 0.01
    batch_bytes: Size = "8MiB"
    threads: int = 2
    failures: int = 3
    cool_down_s: float = 1.0
    strict: bool = False
    key: TierKey | None = None
    tiers: dict[str, TierSettings] = {}

    def of(self, tier: str) -> TierSettings:
        """Return the settings of the tier of this name, the stack's filled in."""
        own = self.tiers.get(tier, TierSettings())
        filled = {
            field: getattr(self, field)
            for field in TierSettings.__struct_fields__
            if getattr(own, field) is None and hasattr(self, field)
        }
        return msgspec.structs.replace(own, **filled)
