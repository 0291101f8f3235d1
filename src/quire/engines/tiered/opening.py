"""A stack of tiers from what people write."""

from collections.abc import Mapping, Sequence

import msgspec

from quire.errors import ConfigError
from quire.tiers.addresses import unquoted
from quire.tiers.base import Tier
from quire.tiers.opening import Spec, open_tiers
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

Tiers = TierStack | Sequence[Tier | Spec]
"""A stack, which stays its maker's to close, or tiers, fastest first: objects, or as `open_tier` reads them."""


def open_stack(
    tiers: Sequence[Tier | Spec], settings: StackSettings | Mapping[str, object] | None = None
) -> TierStack:
    """Open tiers, fastest first, as one stack.

    `settings`: as a mapping, as a TOML file has it. Raises `ConfigError`, with no tier left open,
    and with `strict` what `open_tier` raises; else a tier that is down is left alone until it can be opened.
    """
    if settings is not None and not isinstance(settings, StackSettings):
        try:
            settings = msgspec.convert(dict(settings), StackSettings)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"settings of the tiers: {unquoted(error)}") from None
    if isinstance(tiers, str | Mapping) or not isinstance(tiers, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"tiers are a list, fastest first, got {type(tiers).__name__}")
    opened = open_tiers(tiers, strict=settings is not None and settings.strict)
    try:
        return TierStack(opened, settings)
    except BaseException:
        for tier, given in zip(opened, tiers, strict=True):
            if tier is not given:
                tier.close()
        raise
