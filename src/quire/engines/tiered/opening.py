"""A stack of tiers from its options."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from quire.errors import ConfigError, TierBusy
from quire.tiers.addresses import unquoted
from quire.tiers.base import Tier
from quire.tiers.keys import TierKey
from quire.tiers.opening import Spec, open_tier, open_tiers
from quire.tiers.stack.settings import StackSettings
from quire.tiers.stack.stack import TierStack

KEY_FILE = "key_file"
"""The setting, in text, that names a file of tier keys."""

_log = logging.getLogger(__name__)

Tiers = TierStack | Sequence[Tier | Spec]
"""A stack, which stays its maker's to close, or tiers, fastest first: objects, or as `open_tier` reads them."""


def open_stack(
    tiers: Sequence[Tier | Spec], settings: StackSettings | Mapping[str, object] | None = None
) -> TierStack:
    """Open tiers, fastest first, as one stack.

    `settings`: as a mapping, as a TOML file has it; there `key_file` is the path of a file of tier keys. Raises `ConfigError`, with no tier left open,
    and with `strict` what `open_tier` raises; else a tier that is down is left alone until it can be opened.
    """
    if settings is not None and not isinstance(settings, StackSettings):
        try:
            settings = _settings_of(dict(settings))
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"settings of the tiers: {unquoted(error)}") from None
    if isinstance(tiers, str | Mapping) or not isinstance(tiers, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"tiers are a list, fastest first, got {type(tiers).__name__}")
    chosen = settings or StackSettings()
    opened = open_tiers(tiers, strict=chosen.strict, read_only=chosen.read_only)
    try:
        return TierStack(opened, settings)
    except BaseException:
        for tier, given in zip(opened, tiers, strict=True):
            if tier is not given:
                tier.close()
        raise


def open_free(specs: Sequence[Spec], settings: Mapping[str, object] | None) -> TierStack | None:
    """Open the tiers of one engine; None where none is left.

    A directory that another process has is left out, and a warning says so. Raises `ConfigError` for what cannot be.
    """
    opened: list[Tier | Spec] = []
    try:
        for spec in specs:
            if _is_disk(spec) and not _reads_only(spec, settings or {}):
                try:
                    opened.append(open_tier(spec))
                except TierBusy as error:
                    _log.warning(
                        "this engine runs without one of its tiers: %s; {rank} in a path is the rank of each engine "
                        "on this machine",
                        error,
                    )
            else:
                opened.append(spec)
        return open_stack(opened, settings or StackSettings()) if opened else None
    except BaseException:
        for tier in opened:
            if isinstance(tier, Tier):
                tier.close()
        raise


def ranked(specs: Sequence[Spec], rank: str) -> list[Spec]:
    """Return tiers with a rank in place of `{rank}`: a directory belongs to one process."""

    def filled(value: object) -> object:
        return value.replace("{rank}", rank) if isinstance(value, str) else value

    return [
        each.replace("{rank}", rank)
        if isinstance(each, str)
        else {name: filled(value) for name, value in each.items()}
        for each in specs
    ]


def _settings_of(given: dict[str, object]) -> StackSettings:
    """Return settings from plain values. Tier keys come by the path of their file, never as text: text is shown and logged."""
    if "key" in given:
        raise ConfigError(
            "settings of the tiers: a tier key is not written into settings, which logs, process lists and errors show; "
            f"write it to a file that only its owner reads, and give {KEY_FILE!r}, its path (`quire cache key FILE` makes one)"
        )
    file = given.pop(KEY_FILE, None)
    settings = msgspec.convert(given, StackSettings)
    if file is None:
        return settings
    if not isinstance(file, (str, Path)) or not str(file):
        raise ConfigError(
            f"settings of the tiers: {KEY_FILE} is the path of a file, got {type(file).__name__}"
        )
    return replace(settings, key=TierKey.from_file(file))


def _is_disk(spec: Spec) -> bool:
    return spec.startswith("disk:") if isinstance(spec, str) else spec.get("kind") == "disk"


def _reads_only(spec: Spec, settings: Mapping[str, object]) -> bool:
    return bool(settings.get("read_only") or (isinstance(spec, Mapping) and spec.get("read_only")))
