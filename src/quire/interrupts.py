"""Interrupts: the state of a cache after an exception cuts one of its calls off half-way.

A signal is handled between any two bytecodes, and a library must not block those of a process. So every call
that changes anything is watched, at no cost while nothing happens. quire's own errors are raised before any
change; after any other exception the cache is barred until it is reset.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from quire.errors import Interrupted, InvariantError, QuireError

ALLOWED = frozenset({"reset", "interrupted", "cut_off"})
"""What a barred object still has, beside what Python itself asks for."""

Params = ParamSpec("Params")
Result = TypeVar("Result")
Subject = TypeVar("Subject", bound="_Watched")


class _Watched(Protocol):
    @property
    def cut_off(self) -> Callable[[str, BaseException], None]: ...


class Interruptible:
    """An object that is barred after a call was cut off; `interrupted` names the call and the cause."""

    interrupted: str = ""

    def cut_off(self, call: str, error: BaseException) -> None:
        """Bar this, for an exception that leaves `call`; not for a refusal before any change."""
        refused = isinstance(error, QuireError) and not isinstance(error, InvariantError)
        if not refused and not self.interrupted:
            self.give_up(f"{call} was cut off half-way by {type(error).__name__}")

    def give_up(self, why: str) -> None:
        """Bar this and what it has given out; `reset` starts it anew."""
        raise NotImplementedError


def mutating(
    call: Callable[Concatenate[Subject, Params], Result],
) -> Callable[Concatenate[Subject, Params], Result]:
    """Watch a method that changes its object. The calls of every turn (`CacheManager.open` and others) do it in line."""

    @wraps(call)
    def watched(self: Subject, *args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return call(self, *args, **kwargs)
        except BaseException as error:
            if _has_begun(error):
                self.cut_off(call.__name__, error)
            raise

    return watched


def _has_begun(error: BaseException) -> bool:
    """Return whether an error comes from within the call; kept in no variable there, its frames go with it."""
    trace = error.__traceback__
    return trace is not None and trace.tb_next is not None


def interrupt_in(
    error: BaseException, handled: BaseException | None = None
) -> BaseException | None:
    """Return the interrupt behind an error, as where what tidied up behind it failed; None where there is none.

    `handled`  what was being handled when the call began (`sys.exc_info()[1]`), which did not cut it off
    """
    seen: list[BaseException] = []
    each: BaseException | None = error
    while each is not None and each is not handled and each not in seen:
        if not isinstance(each, Exception):
            return each
        seen.append(each)
        each = each.__context__
    return None


def bar(part: Any, why: str) -> None:
    """Make every use of an object raise `Interrupted`, by giving it another class."""
    if not part.interrupted:
        kind: type = _barred(part.__class__)
        vars(part)["interrupted"] = why
        part.__class__ = kind


def unbar(part: Any) -> None:
    """Give an object back the class that it had."""
    if part.interrupted:
        part.__class__ = type(part).__base__
        del part.interrupted


@cache
def _barred(kind: type) -> type:
    def refuse(self: object, name: str) -> Any:
        if name in ALLOWED or name.startswith("__"):
            return object.__getattribute__(self, name)
        why = object.__getattribute__(self, "interrupted")
        msg = (
            f"{why}: what is cached and who runs is not to be relied on; call reset() (of a "
            "PrefixCache clear()), which starts it empty, and open the requests again"
        )
        raise Interrupted(msg)

    def draw(self: Any) -> str:
        return f"<{kind.__name__}: {self.interrupted}; reset() starts it empty>"

    return type(kind.__name__, (kind,), {"__getattribute__": refuse, "__repr__": draw})
