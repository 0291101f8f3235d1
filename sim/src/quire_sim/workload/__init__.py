"""Made-up traffic: seeded traces of chats, agents, documents, examples and scans, or a mix.

settings        every distribution and every default, and a session of each kind
stream          `Workload`: the trace
prompts         which blocks prompts share
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quire.errors import ConfigError
from quire_sim.distributions import Lognormal
from quire_sim.names import unknown
from quire_sim.workload.settings import KINDS, MIX, Agent, Chat, FewShot, Rag, Scan, TrafficKind
from quire_sim.workload.stream import Traffic, Workload

__all__ = [
    "KINDS",
    "MIX",
    "Agent",
    "Chat",
    "FewShot",
    "Lognormal",
    "Rag",
    "Scan",
    "Traffic",
    "Workload",
    "numbers_of",
    "parts_named",
]


def parts_named(name: str, changes: Mapping[str, float] | None = None) -> dict[str, Traffic]:
    """Return the parts of a workload: one of `KINDS`, or "mix" for all of them.

    `changes`  other numbers than the defaults, by name: "turns", "question.mean", and in a mix
               with the kind before it: "chat.turns". Raises `ConfigError`.
    """
    if name != "mix" and name not in KINDS:
        raise unknown("workload", name, (*KINDS, "mix"))
    wanted = MIX if name == "mix" else {name: 1.0}
    kinds = {kind: KINDS[kind]() for kind in wanted}
    prefix = "" if name == "mix" else f"{name}."
    known = [path for kind in kinds for path in numbers_of(kinds[kind], f"{kind}.")]
    for path, number in (changes or {}).items():
        if prefix + path not in known:
            paths = ", ".join(each.removeprefix(prefix) for each in known)
            raise ConfigError(f"{name} has no number {path!r}; it has {paths}")
        kind, _, rest = (prefix + path).partition(".")
        kinds[kind] = _changed(kinds[kind], rest, number)
    return {kind: Traffic(kinds[kind], share) for kind, share in wanted.items()}


def numbers_of(kind: TrafficKind, prefix: str = "") -> dict[str, float]:
    """Return all numbers of a kind by name: "turns", "question.mean"."""
    numbers: dict[str, float] = {}
    for name in kind.__struct_fields__:
        value: Lognormal | float = getattr(kind, name)
        if isinstance(value, Lognormal):
            numbers[f"{prefix}{name}.mean"] = value.mean
            numbers[f"{prefix}{name}.sigma"] = value.sigma
        else:
            numbers[f"{prefix}{name}"] = value
    return numbers


def _changed(kind: TrafficKind, path: str, number: float) -> TrafficKind:
    name, _, part = path.partition(".")
    value: Lognormal | float = getattr(kind, name)
    try:
        if isinstance(value, Lognormal):
            value = msgspec.structs.replace(value, **{part: float(number)})
        elif isinstance(value, int):
            value = _whole(number)
        else:
            value = float(number)
        return msgspec.structs.replace(kind, **{name: value})
    except ConfigError as error:
        raise ConfigError(f"{path}={number:g}: {error}") from None


def _whole(number: float) -> int:
    if number != int(number):
        raise ConfigError("a whole number is expected")
    return int(number)
