"""Plug-ins: what packages offer by entry points, each of a group and by a name."""

from importlib.metadata import entry_points
from typing import Any

from quire.errors import ConfigError


def names_offered(group: str) -> set[str]:
    """Return the names of all that is offered in a group."""
    return {offer.name for offer in entry_points(group=group)}


def load_offered(group: str, name: str) -> Any:
    """Return what is offered by a name, None if nothing is; raise `ConfigError` if it cannot be had."""
    offers = list(entry_points(group=group, name=name))
    if len(offers) > 1:
        values = ", ".join(sorted(offer.value for offer in offers))
        msg = f"several packages offer {name!r} in {group!r}: {values}; remove all but one"
        raise ConfigError(msg)
    try:
        return offers[0].load() if offers else None
    except (ImportError, AttributeError) as error:
        msg = f"{name!r} ({offers[0].value}) cannot be loaded: {error}"
        raise ConfigError(msg) from error
