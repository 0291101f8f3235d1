"""Names for what a model is: digests of its tensors, and of the settings that its modules hold."""

import hashlib
import operator
import secrets
import sys
import types
from collections.abc import Callable
from typing import Any, cast

import torch
import transformers

from quire.engines.hf.weights import Held

SAMPLED_VALUES = 32

PIECE_BYTES = 64 << 20
"""Weights are copied from a device in pieces of so many bytes."""

Read = Callable[[torch.Tensor], bytes]
"""Turns a tensor into bytes that stand for its values."""


def sampled_values(tensor: torch.Tensor) -> bytes:
    """Return `SAMPLED_VALUES` evenly spaced values.

    It tells checkpoints and fine-tunes apart in milliseconds, and is no proof of equal weights.
    """
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(flat.numel() // SAMPLED_VALUES, 1)][:SAMPLED_VALUES].contiguous()
    return values.view(torch.uint8).cpu().numpy().tobytes()


def all_values(tensor: torch.Tensor) -> bytes:
    """Return SHA-256 over every byte of a tensor; one on a device is copied to the host in pieces."""
    return _through(tensor, hashlib.sha256())


def checksum(tensor: torch.Tensor) -> bytes:
    """Return a checksum over every byte of a tensor: XXH3 with 128 bits, at the speed of memory."""
    import xxhash  # noqa: PLC0415 - of the extra `tiers`

    return _through(tensor, xxhash.xxh3_128())


def _through(tensor: torch.Tensor, checksum: Any) -> bytes:
    if tensor.is_meta:
        return b"meta"
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        checksum.update(cast("Any", flat[start : start + PIECE_BYTES].cpu().numpy()).data)  # pyright: ignore[reportUnknownMemberType] - torch leaves it untyped
    return checksum.digest()


class Names:
    """Canonical text of settings: equal for equal settings, in every process where that can be told.

    Functions and classes go by their module and name. One that cannot be found under its name (a
    closure, a patch) has a name that no other process makes; a second object that claims the name of
    another gets a number.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[object]] = {}
        self._here = secrets.token_hex(8)

    def of(self, fact: object) -> str:
        """Return the text of what `Sight` notes."""
        if isinstance(fact, tuple):
            parts = [self.of(part) for part in cast("tuple[object, ...]", fact)]
            return f"({','.join(parts)})"
        if isinstance(fact, frozenset):
            return f"{{{','.join(sorted(map(self.of, cast('frozenset[object]', fact))))}}}"
        if isinstance(fact, Held):
            return self._numbered(_class_name(type(fact.thing)), fact.thing)
        if isinstance(fact, type):
            return self._numbered(_class_name(cast("type[object]", fact)), fact)
        if isinstance(fact, types.MethodType):
            return f"{self.of(fact.__func__)} of {self._numbered('', fact.__self__)}"
        if isinstance(fact, (types.FunctionType, types.BuiltinFunctionType)):
            return self._numbered(self._function_name(fact), fact)
        return repr(fact)

    def _numbered(self, name: str, thing: object) -> str:
        same = self._known.setdefault(name, [])
        index = next((index for index, each in enumerate(same) if each is thing), len(same))
        if index == len(same):
            same.append(thing)
        return f"{name}#{index}" if index else name

    def _function_name(self, function: Any) -> str:
        where, name = function.__module__, function.__qualname__
        code = getattr(function, "__code__", None)
        inside = (
            "" if code is None else f" {function.__globals__.get('__name__')} {code.co_qualname}"
        )
        found = _look_up(where, name) is function
        return f"{where}.{name}{inside}{'' if found else ' ' + self._here}"


def _class_name(kind: type[object]) -> str:
    """Return the name of a class, with those it is made from as far as it is not found by its own."""
    names: list[str] = []
    for each in kind.__mro__:
        names.append(f"{each.__module__}.{each.__qualname__}")
        if _look_up(each.__module__, each.__qualname__) is each:
            break
    return "<".join(names)


def _look_up(module: str | None, name: str) -> object:
    try:
        return operator.attrgetter(name)(sys.modules[module or "builtins"])
    except (KeyError, AttributeError):
        return None


def release() -> str:
    """Return the release of the library that computes, as far as its numbers may depend on it."""
    return ".".join(transformers.__version__.split(".")[:2])
