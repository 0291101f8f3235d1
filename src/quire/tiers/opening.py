"""Tiers from options: a line of text, or a table of a TOML file.

    host:8GiB
    disk:/var/kv?capacity=200GiB
    files:/mnt/shared/kv                       files:/mnt/shared/kv?capacity=2TiB&group=kv
    redis://user:password@host:6379/0          rediss:// redis+cluster:// rediss+cluster:// unix://
    s3://bucket/prefix?region=eu-central-1     gs://bucket/prefix memory://
    az://container/prefix?account_name=mine

What follows `?` are options by name. The same as a table, where values may be of any type:

    [[tiers]]
    kind = "disk"
    path = "/var/kv"
    capacity = "200GiB"

A package adds a kind by an entry point of that name in the group `quire.tiers`: a class or a function
that is called with what stands behind the colon and the options by name, as its annotations say what they are,
and returns a `Tier`. So does quire itself for `mooncake:127.0.0.1:50051?memory=4GiB`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints
from urllib.parse import parse_qsl, urlencode

import msgspec

from quire.errors import ConfigError, TierBusy, TierError
from quire.plugins import load_offered, names_offered
from quire.tiers.addresses import described, is_word, shown, unquoted
from quire.tiers.base import Tier
from quire.tiers.redis.url import TLS_OPTIONS
from quire.tiers.wrapped import Late

Spec: TypeAlias = str | Mapping[str, object]
"""A line of text or a table, as in the module."""

GROUP = "quire.tiers"

_SCHEMES = {
    **dict.fromkeys(("redis", "rediss", "redis+cluster", "rediss+cluster", "unix"), "redis"),
    **dict.fromkeys(("s3", "gs", "az", "memory"), "objects"),
}
_IN_REDIS_URL = (*TLS_OPTIONS, "db")


class _TierKind(msgspec.Struct, frozen=True):
    """A kind of tier.

    `home`     module and class, loaded when it is asked for: most need packages of their own
    `options`  all options by type, the one that stands behind the colon first
    `needed`   so many of these it cannot be opened without
    `in_url`   options that become part of the first
    `other`    the option that takes what is not in `options`, as a mapping
    """

    home: str
    example: str
    options: dict[str, Any]
    needed: int = 1
    in_url: tuple[str, ...] = ()
    other: str = ""

    @property
    def where(self) -> str:
        """The option that stands behind the colon."""
        return next(iter(self.options))


_SIZE = int | str
_OF_DIRECTORIES: dict[str, Any] = {"group": str, "read_only": bool}
_KINDS = {
    "host": _TierKind("host.tier:Host", "host:8GiB", {"capacity": _SIZE}),
    "disk": _TierKind(
        "disk.tier:Disk",
        "disk:/var/kv?capacity=200GiB",
        {"path": str, "capacity": _SIZE, "direct": bool, "ahead": _SIZE} | _OF_DIRECTORIES,
        needed=2,
    ),
    "files": _TierKind(
        "files.tier:Files",
        "files:/mnt/shared/kv",
        {"path": str, "capacity": _SIZE} | _OF_DIRECTORIES,
    ),
    "redis": _TierKind(
        "redis.tier:Redis",
        "redis://localhost:6379",
        {"url": str, "ttl_s": float, "prefix": str, "connections": int}
        | dict.fromkeys(_IN_REDIS_URL, str),
        in_url=_IN_REDIS_URL,
    ),
    "objects": _TierKind(
        "objects.tier:Objects",
        "s3://bucket/prefix",
        {
            "url": str,
            "bundle": _SIZE,
            "concurrency": int,
            "refresh_s": float,
            "config": dict[str, str | bool],
            "client_options": dict[str, Any],
        },
        other="config",
    ),
}


def open_tier(spec: Spec) -> Tier:
    """Open the tier that a line or a table names.

    Raises `ConfigError` for a kind that nobody offers, unknown or missing options and values that
    cannot be; `TierError` where the tier cannot be opened. Messages show no passwords.
    """
    kind, options = _parsed(spec)
    name = options.pop("name", None)
    if name is not None and (not isinstance(name, str) or not name):
        raise ConfigError(f"the name of a tier is text, not {described('name', name)}")
    known = _KINDS.get(kind)
    tier = _open_known(kind, known, options) if known else _open_offered(kind, options)
    if name is not None:
        tier.name = name
    return tier


def open_tiers(
    specs: Sequence[Spec | Tier], *, strict: bool = False, read_only: bool = False
) -> list[Tier]:
    """Open several tiers, the fastest first; tiers that are open already are taken as they are.

    `read_only` opens directories so that nothing in them is written.

    One that is down is a tier that fails, and is tried again (`Late`); `strict` raises its error. An error of what was
    written, or of a directory that another process has, is raised in any case, and those opened here are closed.
    """
    with ExitStack() as opened:
        tiers: list[Tier] = []
        for spec in specs:
            if isinstance(spec, Tier):
                tiers.append(spec)
                continue
            wanted = to_read(spec) if read_only else spec
            tier = open_tier(wanted) if strict else _open_or_later(wanted)
            tiers.append(opened.enter_context(tier))
        opened.pop_all()
    return tiers


def _open_or_later(spec: Spec) -> Tier:
    try:
        return open_tier(spec)
    except TierBusy:
        raise
    except TierError as error:
        kind, options = _parsed(spec)
        return Late(str(options.get("name", kind)), partial(open_tier, spec), error)


def to_read(spec: Spec) -> Spec:
    """Return what opens a directory to read only; any other tier as it is."""
    kind, options = _parsed(spec)
    known = _KINDS.get(kind)
    if known is None or "read_only" not in known.options:
        return spec
    return {"kind": kind, **options, "read_only": True}


def _parsed(spec: Spec) -> tuple[str, dict[str, Any]]:
    """Return kind and options of a line or a table."""
    if isinstance(spec, str):
        return _parse_line(spec)
    if isinstance(spec, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - not everybody checks types
        return _parse_table(spec)
    raise ConfigError(
        f"a tier is named by a line, as 'host:8GiB', or by a table, got {type(spec).__name__}"
    )


def _parse_line(line: str) -> tuple[str, dict[str, Any]]:
    """Return kind and options of a line."""
    head, colon, rest = line.partition(":")
    if not colon or not head or "@" in head:
        raise ConfigError(
            f"{shown(line)!r} names no tier: write kind:where, for example 'host:8GiB' or "
            f"'disk:/var/kv?capacity=200GiB'; kinds: {', '.join(_known_kinds())}"
        )
    before, _, query = rest.partition("?")
    if "@" in query and "@" not in before and before.startswith("//"):
        raise ConfigError(
            f"{shown(line)!r}: what stands before an @ is user and password; percent-encode what is "
            "special in them: ? as %3F, / as %2F, # as %23, @ as %40; elsewhere, write @ as %40"
        )
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ConfigError(
            f"{shown(line)!r}: behind the question mark stand options, name=value&name=value"
        ) from None
    options: dict[str, Any] = dict(pairs)
    if len(options) < len(pairs):
        raise ConfigError(f"{shown(line)!r}: an option is given twice")
    if head in _SCHEMES and not before.startswith("//"):
        raise ConfigError(f"{shown(line)!r} is no URL: write {head}://...")
    kind = _SCHEMES.get(head, head)
    where = f"{head}:{before}" if head in _SCHEMES else before.removeprefix("//")
    known = _KINDS.get(kind)
    option = known.where if known else "where"
    if where:
        if option in options:
            raise ConfigError(f"{shown(line)!r}: {option} is given twice")
        options[option] = where
    return kind, options


def _parse_table(table: Mapping[str, object]) -> tuple[str, dict[str, Any]]:
    """Return kind and options of a table."""
    options = dict(table)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or not kind:
        raise ConfigError(
            f"a table of a tier needs kind, one of {', '.join(_known_kinds())}; it has "
            f"{', '.join(map(str, table)) or 'nothing'}"
        )
    return kind, options


def _open_known(kind: str, known: _TierKind, options: dict[str, Any]) -> Tier:
    arguments: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in options.items():
        if name in known.options:
            arguments[name] = _converted(kind, name, value, known.options[name])
        elif known.other and isinstance(value, (str, bool)):
            others[name] = value
        else:
            raise ConfigError(
                f"{kind} has no option {name!r}{_meant(name, known.options)}; options: "
                f"{', '.join([*known.options, 'name'])}"
            )
    needed = 1 if arguments.get("read_only") else known.needed
    for name in [*known.options][:needed]:
        if arguments.get(name, "") == "":
            raise ConfigError(f"{kind} needs {name}, for example {known.example!r}")
    if others:
        arguments[known.other] = arguments.get(known.other, {}) | others
    where = arguments.pop(known.where)
    in_url = {name: arguments.pop(name) for name in known.in_url if name in arguments}
    if in_url:
        where += ("&" if "?" in where else "?") + urlencode(in_url)
    module, _, name = known.home.partition(":")
    tier: Callable[..., Tier] = getattr(import_module(f"quire.tiers.{module}"), name)
    return tier(Path(where).expanduser() if known.where == "path" else where, **arguments)


def _open_offered(kind: str, options: dict[str, Any]) -> Tier:
    """Open a tier of a kind that another package offers."""
    factory = load_offered(GROUP, kind)
    if factory is None:
        if kind in _SCHEMES:
            raise ConfigError(
                f"{kind!r} is how an address begins and no kind of tier: write "
                f"kind = {_SCHEMES[kind]!r} and url = '{kind}://...'"
            )
        names = [*_known_kinds(), *_SCHEMES]
        raise ConfigError(
            f"no tier is called {shown(kind)!r}{_meant(kind, names)}; kinds: {', '.join(_known_kinds())}; "
            f"a package may add one by an entry point of the group {GROUP!r}"
        )
    where = options.pop("where", "")
    hints = get_type_hints(factory.__init__ if isinstance(factory, type) else factory)
    typed = {
        name: _converted(kind, name, each, hints.get(name, Any)) for name, each in options.items()
    }
    try:
        tier = factory(where, **typed)
    except TypeError as error:
        raise ConfigError(f"the tier {kind!r}: {error}") from error
    if not isinstance(tier, Tier):
        raise ConfigError(
            f"{kind!r} of {GROUP!r} gave {type(tier).__name__}, which is no quire Tier"
        )
    return tier


def _converted(kind: str, name: str, value: object, wanted: Any) -> Any:
    try:
        converted = msgspec.convert(value, wanted, strict=False)
    except msgspec.ValidationError as error:
        reason = unquoted(error)
        raise ConfigError(f"{kind}: {name} cannot be {described(name, value)}: {reason}") from None
    if wanted == _SIZE and isinstance(value, str) and not is_word(value):
        raise ConfigError(f"{kind}: {name} cannot be {described(name, value)}: give a size, '8GiB'")
    return converted


def _known_kinds() -> list[str]:
    return sorted(names_offered(GROUP) | set(_KINDS))


def _meant(word: str, words: Sequence[str] | Mapping[str, Any]) -> str:
    near = get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""
