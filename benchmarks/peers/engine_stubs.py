"""Stand-ins for the parts of SGLang's engine that its prefix trees import and never call.

SGLang's tree modules import model layers, GPU kernels and model configurations at the top of their
files; on a machine without a GPU some of those cannot be imported at all. `install` answers these
imports with empty stand-ins. The trees, allocators, events and the compiled core are the installed
ones.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence

ABSENT = (
    "triton",
    "torchvision",
    "transformers",
    "sglang.kernels",
    "sglang.srt.disaggregation.utils",
    "sglang.srt.distributed",
    "sglang.srt.layers",
    "sglang.srt.managers",
    "sglang.srt.model_executor",
    "sglang.srt.models",
    "sglang.srt.multimodal",
    "sglang.srt.sampling",
    "sglang.srt.utils.hf_transformers",
)
"""Packages answered with stand-ins, their submodules included."""

HOLLOW = ("sglang", "sglang.srt.configs", "sglang.srt.disaggregation")
"""Packages whose submodules are real, but whose `__init__` is not run."""


class StandIn:
    """An object that can be called, indexed, inherited from and used as a decorator."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Return the decorated function or class, or this object."""
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return self

    def __getattr__(self, name: str) -> StandIn:
        return _stand_in(name)

    def __getitem__(self, _: object) -> StandIn:
        return self

    def __or__(self, _: object) -> StandIn:
        return self

    __ror__ = __or__

    def __mro_entries__(self, _: tuple[type, ...]) -> tuple[type, ...]:
        return ()


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports below `absent` and the packages in `hollow`."""

    def __init__(self, absent: Sequence[str], hollow: Sequence[str]) -> None:
        self._absent = tuple(absent)
        self._hollow = frozenset(hollow)

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,  # the finder protocol
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for a stubbed module, None for every other."""
        if fullname in self._hollow:
            spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            real = importlib.machinery.PathFinder.find_spec(fullname, path)
            if real is None:
                return None
            spec.submodule_search_locations = real.submodule_search_locations
            return spec
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._absent):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return an empty module whose missing names are stand-ins."""
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = _stand_in
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Run nothing."""


def install() -> None:
    """Put the stub finder in front of the import path."""
    sys.meta_path.insert(0, StubFinder(ABSENT, HOLLOW))


def _stand_in(name: str) -> StandIn:
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn(name)
