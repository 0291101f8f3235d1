"""Names as people type them: case, separators and vendor prefixes do not matter."""

import difflib
import re
from collections.abc import Iterable

from quire.errors import ConfigError


def plain(name: str) -> str:
    """Return a name without what people write differently: `Meta/Llama_3.1 8B` is `llama-3.1-8b`."""
    return re.sub(r"[\s_-]+", "-", name.strip().lower().rsplit("/", 1)[-1])


def unknown(what: str, name: object, known: Iterable[str], instead: str = "") -> ConfigError:
    """Return the error for a name that is not among the known ones, with those it resembles."""
    names = list(known)
    wanted = plain(str(name))
    near = [each for each in names if wanted and each.startswith(wanted)][:3]
    near = near or difflib.get_close_matches(wanted, names, n=3, cutoff=0.5)
    meant = f"did you mean {' or '.join(near)}? " if near else ""
    others = f"; or {instead}" if instead else ""
    return ConfigError(f"unknown {what} {name!r}; {meant}there are {', '.join(names)}{others}")
