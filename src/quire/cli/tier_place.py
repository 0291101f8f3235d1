"""Places of tiers for commands: a directory that one has written, or an address."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigError, TierError
from quire.extras import require

if TYPE_CHECKING:
    from quire.tiers.base import Tier
    from quire.tiers.contents.names import NameBook

_SLAB = re.compile(r"slab-[1-9][0-9]*\.quire")
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):")
_KINDS = ("disk", "files")


@dataclass(frozen=True)
class OpenedTier:
    """An open tier, its directory if it has one, and the names beside its records."""

    tier: "Tier"
    path: Path | None
    names: "NameBook"


def kind_of(path: Path) -> str | None:
    """Return "disk" or "files" for a directory that has the marker of such a tier, else None."""
    from quire.tiers.directory import kind_marked

    kind = kind_marked(path)
    return kind if kind in _KINDS else None


def check_installed() -> None:
    """Raise `ConfigError` where the package that every tier needs is missing."""
    require("cli", "looking into a tier")


@contextmanager
def reading(place: str) -> Generator[OpenedTier]:
    """Open a tier to look at it: nothing of it is changed."""
    from quire.tiers.contents.readers import ReadOnlyView
    from quire.tiers.disk import Disk
    from quire.tiers.files import Files
    from quire.tiers.opening import open_tier

    path = path_of(place)
    if path is None:
        tier = ReadOnlyView(open_tier(place))
    elif _checked_kind(place, path) == "files":
        tier = Files(path, read_only=True)
    else:
        tier = Disk(path, read_only=True)
    yield from _placed(tier, path)


@contextmanager
def writing(place: str, capacity_bytes: int | None = None) -> Generator[OpenedTier]:
    """Open a tier to change it. A directory of slabs keeps its size, unless a capacity is given."""
    from quire.tiers.disk import Disk
    from quire.tiers.files import Files
    from quire.tiers.opening import open_tier

    path = path_of(place)
    if path is None or _ADDRESS.match(place):
        tier = open_tier(place)
    elif _checked_kind(place, path) == "files":
        tier = Files(path)
    else:
        held = sum(file.lstat().st_size for file in path.iterdir() if _SLAB.fullmatch(file.name))
        tier = Disk(path, max(held if capacity_bytes is None else capacity_bytes, 1))
    if isinstance(tier, Disk | Files) and tier.is_read_only:
        tier.close()
        raise TierError(f"{shown(place)!r} cannot be changed: nothing may be written there")
    yield from _placed(tier, path)


def shown(place: str) -> str:
    """Return a place as it may be printed: an address without user, password and options."""
    from quire.tiers.addresses import shown as address_shown

    return address_shown(place) if is_address(place) else place


def path_of(place: str) -> Path | None:
    """Return the directory that a place is, or that `disk:` and `files:` name; None for others.

    A cache that `PrefixCache.save` wrote has its records in a directory below.
    """
    match = _ADDRESS.match(place)
    if match is None:
        path = Path(place).expanduser()
        below = path / "records"
        return below if kind_of(path) is None and kind_of(below) is not None else path
    if match[1] not in _KINDS:
        return None
    return Path(place[match.end() :].partition("?")[0].removeprefix("//")).expanduser()


def is_address(place: str) -> bool:
    """Whether a place is an address, as `--tier` takes it, and not a path."""
    return _ADDRESS.match(place) is not None and not Path(place).exists()


def _placed(tier: "Tier", path: Path | None) -> Generator[OpenedTier]:
    from quire.tiers.contents.names import NameBook

    with tier:
        yield OpenedTier(tier, path, NameBook() if path is None else NameBook.read(path))


def _checked_kind(place: str, path: Path) -> str:
    from quire.tiers.directory import MARKER

    kind = kind_of(path)
    named = _ADDRESS.match(place)
    if kind is None and named is not None and path.is_dir():
        return named[1]
    if kind is None:
        hint = f"to begin one give its kind, 'disk:{place}?capacity=200GiB' or 'files:{place}'"
        if not path.exists():
            reason = "there is no such directory"
        elif path.is_dir():
            reason = f"it has no marker {MARKER!r}"
        else:
            reason, hint = "it is no directory", "give the directory"
        raise ConfigError(f"{place!r} is not the directory of a tier: {reason}; {hint}")
    return kind
