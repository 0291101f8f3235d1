"""Tier keys for the tiers of a stack, when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from quire.errors import ConfigError
from quire.tiers.base import Outcome, Tier
from quire.tiers.format import new_buffer
from quire.tiers.keys import TierKey
from quire.tiers.trust import Trust


def vouch(tiers: Sequence[Tier], key: TierKey | None) -> None:
    """Have tiers accept only records that a tier key has signed; None: all records.

    A tier in memory is not verified when it is read, so its records are verified here, and others dropped. Raises
    `ConfigError` for a tier with another key.
    """
    if key is None:
        return
    for tier in tiers:
        if tier.trust is not None and tier.trust.key != key:
            raise ConfigError(
                f"the tier {tier.name} is used with {tier.trust.key!r}, it cannot be with {key!r} as well; "
                "open a tier of its own for each stack"
            )
    for tier in tiers:
        if tier.trust is None:
            tier.trust = Trust(key)
            if tier.in_memory:
                _drop_unsigned(tier, tier.trust)


def _drop_unsigned(tier: Tier, trust: Trust) -> None:
    """Delete what a tier in memory has that no tier key has signed."""
    with suppress(NotImplementedError):  # a tier of others, which lists nothing
        for each in list(tier.scan()):
            buffer = new_buffer(each.num_bytes)
            if tier.get([each.key], [buffer]) != [Outcome.HIT] or (
                trust.judge(buffer) is not Outcome.HIT
            ):
                tier.delete([each.key])
