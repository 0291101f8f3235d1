"""What nobody closed is closed when the interpreter ends, so that what waits is written."""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakKeyDictionary


class Closable(Protocol):
    """What can be closed, twice too."""

    def close(self) -> None:
        """End it."""


_open: WeakKeyDictionary[Closable, int] = WeakKeyDictionary()
"""By the process that opened it: a forked one has none of its threads."""


def close_at_exit(opened: Closable) -> None:
    """Close it when this process ends, if nobody has done so before."""
    _open[opened] = os.getpid()


@atexit.register
def close_all() -> None:
    """Close what this process has opened."""
    for opened, process in list(_open.items()):
        if process == os.getpid():
            opened.close()
