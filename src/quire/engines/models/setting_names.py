"""Texts of settings that are equal for equal settings, as parts of a model's name."""

import operator
import secrets
import sys
import types
from typing import Any, cast

from quire.engines.models.compiled import uncompiled
from quire.engines.models.inventory_entries import Held


class SettingNames:
    """Canonical text of settings: equal for equal settings, in every process where that can be told.

    Functions and classes go by module and name. One that is not found there (a closure, a patch) has
    a name that no other process makes; a second one of the same name gets a number.
    """

    def __init__(self) -> None:
        self._known: dict[str, list[object]] = {}
        self._here = secrets.token_hex(8)

    def of(self, fact: object) -> str:
        """Return the text of what `Inventory` notes."""
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
            return (
                f"{self.of(cast('object', fact.__func__))} of {self._numbered('', fact.__self__)}"
            )
        if isinstance(fact, (types.FunctionType, types.BuiltinFunctionType)):
            return self._numbered(self._function_name(fact), fact)
        if callable(fact):  # an object with settings that nothing is known of
            return f"{self._numbered(_class_name(type(fact)), fact)} {self._here}"
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
        found = uncompiled(_look_up(where, name)) is function
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
