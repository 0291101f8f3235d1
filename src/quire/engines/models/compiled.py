"""Code that `torch.compile` has wrapped: it computes what it wraps, up to rounding, and counts as that."""

import sys
import types
from collections.abc import Iterator
from typing import Any, cast

from quire.engines.models.interception import SeenForward

CALLED_BY = frozenset({"forward", "_compiled_call_impl"})
"""Attributes that a module is called by where they are set."""

# Where the wrappers of torch.compile hold what they wrap, by the module of torch whose functions they are.
_HOLD = {
    "torch._dynamo.eval_frame": "_torchdynamo_orig_callable",
    "torch._dynamo.external_utils": "__wrapped__",
}


def is_compiled(module: object) -> bool:
    """Whether a module is one that `torch.compile(module)` returns."""
    dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and type(module) is dynamo.OptimizedModule


def uncompiled(function: Any) -> Any:
    """Return the function that `torch.compile` or `torch.compiler.disable` has wrapped; any other as it is.

    A function that has copied the attributes of a wrapper (`functools.wraps`) is another one.
    """
    while isinstance(function, types.FunctionType):
        name = _HOLD.get(str(function.__globals__.get("__name__")))
        inner = vars(function).get(name) if name else None
        if inner is None:
            return function
        function = inner
    if isinstance(function, types.MethodType):
        inner = uncompiled(function.__func__)
        return (
            function if inner is function.__func__ else types.MethodType(inner, function.__self__)
        )
    return function


def replaced(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the functions that replace a module's own methods: (name, function).

    Compiled code and open sessions are left out.
    """
    own = cast("dict[str, Any]", vars(module))
    for name in sorted(CALLED_BY & own.keys()):
        value = uncompiled(own[name])
        while isinstance(value, SeenForward):
            value = uncompiled(value.beneath())
        if value is not None and not _is_own(module, name, value):
            yield name, value


def _is_own(module: Any, name: str, function: Any) -> bool:
    """Whether a function is the method that a module is called by without that attribute."""
    of, method = module, "_call_impl"
    if name == "forward":
        method = name
        if is_compiled(module):
            of, method = module._orig_mod, "__call__"  # noqa: SLF001 - its only name
            if function is of:
                return True
    kind = cast("Any", type(of))
    return (
        isinstance(function, types.MethodType)
        and function.__self__ is of
        and function.__func__ is uncompiled(getattr(kind, method))
    )
