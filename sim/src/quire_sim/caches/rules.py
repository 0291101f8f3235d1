"""Rules of providers' prompt caches, read from a TOML file."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.assets import CACHE_RULES
from quire.errors import ConfigError


class CacheRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a provider's cache for some models; the head of `rules.toml` says what each field means."""

    names: tuple[str, ...]
    kind: Literal["steps", "breakpoints"]
    minimum: int
    ttl_s: int
    read: float
    write: dict[int, float]
    step: int = 1
    retained_s: int = 0
    is_refreshed: bool = True
    has_implicit: bool = False
    most_breakpoints: int = 4
    look_back: int = 0
    route_tokens: int = 0
    route_rpm: int = 0
    keys: dict[Literal["tools", "system", "messages"], tuple[str, ...]] = {}

    def __post_init__(self) -> None:
        for name in ("minimum", "ttl_s", "step", "most_breakpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is at least 1")
        if (
            min(self.look_back, self.route_tokens, self.route_rpm) < 0
            or self.read < 0
            or any(price < 0 for price in self.write.values())
        ):
            raise ValueError("look_back, route_tokens, route_rpm, read and write are 0 or more")

    def write_price(self, ttl_s: int) -> float:
        """Return the price of writing a token for so many seconds, as a share of an input token's."""
        return self.write.get(ttl_s, self.write.get(self.ttl_s, 1.0))


class ProviderRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a provider: their source, its date, the rules by model, and the names of TTLs in requests."""

    source: str
    date: str
    models: tuple[CacheRules, ...]
    ttls: dict[str, int] = {}

    def of(self, model: str) -> CacheRules:
        """Return the rules of a model. Raises `ConfigError` if none of the names fits."""
        name = model.rpartition("/")[2].lower()
        for rules in self.models:
            if any(fnmatchcase(name, pattern) for pattern in rules.names):
                return rules
        raise ConfigError(
            f'the rules name no model that fits {model!r}; add a last entry with names = ["*"]'
        )


def read_rules(path: str | Path | None = None) -> dict[str, ProviderRules]:
    """Return the rules of providers by name, from a file or as they come with quire. Raises `ConfigError`."""
    source = CACHE_RULES if path is None else Path(path).expanduser()
    try:
        text = source.read_bytes()
    except OSError as error:
        raise ConfigError(f"the rules {path} cannot be read: {error.strerror}") from None
    try:
        return msgspec.toml.decode(text, type=dict[str, ProviderRules], strict=False)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"the rules {path} are wrong: {error}") from None


def rules_of(server: str, rules: dict[str, ProviderRules]) -> ProviderRules:
    """Return the rules of a provider. Raises `ConfigError` if the file has none of it."""
    if server not in rules:
        known: Any = ", ".join(sorted(rules)) or "none"
        raise ConfigError(f"the rules have no section [{server}]; they have {known}")
    return rules[server]
