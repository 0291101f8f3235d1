"""Plug-ins: objects that packages offer by entry points, each of a group and by a name."""

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from typing import Any

from quire.errors import ConfigError


def names_offered(group: str) -> set[str]:
    """Return the names of all that is offered in a group."""
    return set(_offers(group).names)


def load_offered(group: str, name: str) -> Any:
    """Return what is offered by a name, None if nothing is; raise `ConfigError` if it cannot be had."""
    offers = list(_offers(group).select(name=name))
    if len(offers) > 1:
        values = ", ".join(sorted(offer.value for offer in offers))
        msg = f"several packages offer {name!r} in {group!r}: {values}; remove all but one"
        raise ConfigError(msg)
    try:
        return offers[0].load() if offers else None
    except (ImportError, AttributeError) as error:
        msg = f"{name!r} ({offers[0].value}) cannot be loaded: {error}"
        raise ConfigError(msg) from error


def chosen(given: object, base: type, group: str, own: Mapping[str, object]) -> Callable[..., Any]:
    """Return what makes objects of `base`: given, or by its name among one's own or those offered in a group.

    A class that is no `base` is made first, without arguments: it is a factory then. Raises `ConfigError`.
    """
    kind, factory = base.__name__, given
    if isinstance(given, str):
        factory = own[given] if given in own else load_offered(group, given)
    if isinstance(factory, type) and not issubclass(factory, base):
        try:
            factory = factory()
        except TypeError as error:
            raise ConfigError(
                f"{kind.lower()} is no {kind} and wants arguments: {error}"
            ) from error
    if not callable(factory):
        known = ", ".join(sorted({*own, *names_offered(group)}))
        raise ConfigError(
            f"unknown {kind.lower()} {given!r}; there are {known}, and what makes quire.core.{kind} objects"
        )
    return factory


def _offers(group: str) -> EntryPoints:
    """Return all that is offered in a group: read again when a place of packages has changed, since it takes 8 ms."""
    return _read(group, tuple((place, _changed_ns(place)) for place in sys.path))


@lru_cache(maxsize=16)
def _read(group: str, _: tuple[tuple[str, int], ...]) -> EntryPoints:
    return entry_points(group=group)


def _changed_ns(place: str) -> int:
    try:
        return Path(place).stat().st_mtime_ns
    except OSError:  # it is not there
        return 0
