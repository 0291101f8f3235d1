"""The threads that OpenMP keeps, of the library that torch runs on."""

from ctypes import CDLL, c_int
from functools import cache
from importlib.util import find_spec

_SOFT = 1
"""omp_pause_soft: what was set stays."""


@cache
def openmp() -> CDLL:
    """Return torch with all libraries that it needs: a symbol is looked for in each of them."""
    found = find_spec("torch._C")
    return CDLL(found and found.origin)


def release_team() -> None:
    """End the threads that OpenMP keeps for the calling thread; its next work in parallel starts them again.

    GNU's OpenMP counts the threads of all teams. Beyond the number of CPUs, a thread that waits for its team sleeps at
    once, and is woken for each of some hundred waits of a step. So who computes on a thread of its own has all others
    let go of theirs.
    """
    pause = getattr(openmp(), "omp_pause_resource_all", None)
    if pause is not None:
        pause(c_int(_SOFT))
