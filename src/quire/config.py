"""Settings as people write them: sizes in bytes, counts, and files of them.

Units: `KB`, `MB`, `GB`, `TB` are powers of 1000, `KiB`, `MiB`, `GiB`, `TiB` powers of 1024,
`B` or nothing is bytes; case does not matter.
"""

import os
import re
from collections.abc import Iterable
from difflib import get_close_matches
from operator import index
from pathlib import Path
from typing import Any, SupportsIndex

from quire.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power

_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*", re.ASCII)

MAX_BYTES = 1 << 62
"""No size above this is taken for meant: the limit of signed 64-bit arithmetic, halved."""

MAX_SECONDS = 1e9
"""The longest retention, time to live or time to a return: about 31 years."""

MAX_COUNT = 2**31 - 1
"""The largest number of tokens or blocks: they are counted in 32 bits."""


def parse_bytes(size: object) -> int:
    """Return the bytes that `size` says: `"1GiB"`, `"512 MB"`, `"1.5gib"`, `4096`.

    Raises `ConfigError` for text that is no size, an unknown unit, a size below one byte or
    above `MAX_BYTES`, and for anything that is neither text nor an integer.
    """
    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise ConfigError(
            f"a size is text like '1GiB' or an integer number of bytes, not {size!r} "
            f"({type(size).__name__})"
        )
    num_bytes = size if isinstance(size, int) else _parse_text(size)
    if not 1 <= num_bytes <= MAX_BYTES:
        raise ConfigError(
            f"the size {size!r} is {num_bytes} bytes; it must be between 1 and {MAX_BYTES}, "
            "for example '1GiB'"
        )
    return num_bytes


def check_count(name: str, value: object, *, limit: int = MAX_COUNT) -> int:
    """Return a positive integer setting; raise `ConfigError` if it is none."""
    if type(value) is not int:
        value = as_int(name, value)
    if not 1 <= value <= limit:
        raise ConfigError(f"{name} must be from 1 to {limit}, got {value}")
    return value


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Return a number from `low` to `high`; raise `ConfigError` if it is none, no number and no bool."""
    if type(value) not in (int, float) or not low <= value <= high:  # pyright: ignore[reportOperatorIssue]
        raise ConfigError(f"{name} is a number from {low:g} to {high:g}, got {value!r}")
    return value  # pyright: ignore[reportReturnType]


def check_seconds(name: str, seconds: object) -> float:
    """Return a duration in seconds, 0.0 for None; raise `ConfigError` if it cannot work: zero, negative, no number."""
    if seconds is None:
        return 0.0
    if type(seconds) not in (int, float) or not 0 < seconds <= MAX_SECONDS:  # pyright: ignore[reportOperatorIssue]
        msg = f"{name} must be a number of seconds, above 0 and up to {MAX_SECONDS:g}, as an int or float"
        raise ConfigError(f"{msg}, got {seconds!r}")
    return seconds  # pyright: ignore[reportReturnType]


def check_text(name: str, text: object) -> None:
    """Raise `ConfigError` unless this is a text that is not empty."""
    if not isinstance(text, str) or not text:
        raise ConfigError(f"{name} is a text, not empty, got {text!r}")


def as_int(name: str, value: object) -> int:
    """Return an integer, which may be of another type (NumPy's, say), as an int."""
    if type(value) is int:  # before the protocol, which takes 30 times as long
        return value
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return index(value)
    except TypeError:  # an array of several, say
        pass
    raise ConfigError(f"{name} must be an integer, got {value!r}")


def format_bytes(num_bytes: int) -> str:
    """Return `num_bytes` for people, with one decimal: `1.5 GiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raises `ConfigError` for one that cannot be read."""
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that this process may use: the machine's, or less where its control groups have a limit.

    `root`  the folder that has `proc` and `sys`
    """
    return min([_machine_bytes(), *(limit for limit, _ in _group_limits(root))])


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that programs may still take, here and in each control group; None where the system is silent."""
    said = _read_text(root / "proc/meminfo")
    kib = re.search(r"^MemAvailable: *(\d+)", said, re.MULTILINE)
    left = [max(0, limit - used) for limit, used in _group_limits(root)]
    return min([int(kib[1]) * 1024, *left]) if kib else None


def _machine_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_limits(root: Path) -> list[tuple[int, int]]:
    """Return limit and use of the control groups of this process that limit memory, of either version of Linux's."""
    found: list[tuple[int, int]] = []
    mounted = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = mounted, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top = mounted / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        own = top / path.strip("/")
        for folder in (own, *own.parents):  # a container sees its own group as the topmost one
            if folder != top and top not in folder.parents:
                break
            limit, used = (_read_text(folder / name).strip() for name in names)
            if limit.isdigit():
                file = re.search(
                    r"^(?:total_)?inactive_file (\d+)",
                    _read_text(folder / "memory.stat"),
                    re.MULTILINE,
                )
                held = int(used or 0) - (
                    int(file[1]) if file else 0
                )  # files that are dropped at need
                found.append((int(limit), max(0, held)))
    return found


def _read_text(path: Path) -> str:
    """Return the text of a file of the system; empty where it cannot be read."""
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def user_cache() -> Path:
    """Return quire's directory in the user's cache directory, which is there or not.

    Raises `RuntimeError` where the user has no home and `XDG_CACHE_HOME` names none.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "quire"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises `ConfigError` for one that cannot be read."""
    import tomllib  # noqa: PLC0415 - few processes read any

    try:
        return tomllib.loads(read_bytes(path).decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} is no TOML: {error}") from error


def _parse_text(text: str) -> int:
    match = _SIZE.fullmatch(text)
    if match is None:
        # An address in its place may hold a password.
        seen = "an address" if "://" in text else repr(text)
        raise ConfigError(
            f"{seen} is not a size; write a number and a unit, for example '1GiB' or '512MB'"
        )
    unit = _UNITS.get(match["unit"].lower())
    if unit is None:
        raise ConfigError(
            f"{match['unit']!r} in {text!r} is not a unit of size; use B, KB, MB, GB, TB, "
            "KiB, MiB, GiB or TiB"
        )
    if len(match["number"]) > 24:
        raise ConfigError(f"{text[:40]!r}... has more digits than a size needs (limit 24)")
    whole, _, fraction = match["number"].partition(".")
    return int(whole) * unit + int(fraction or 0) * unit // 10 ** len(fraction)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the known name that is most like this one, or nothing."""
    close = get_close_matches(name, sorted(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
