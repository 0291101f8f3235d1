"""How the kernel is compiled, where its code is kept, and with how many threads it runs."""

# pyright: basic, reportAttributeAccessIssue=false

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from numba import config, njit, set_num_threads

MATHS = {"contract", "nsz", "arcp"}  # infinite scores and the order of sums stay as written


def code_folder(room: Path) -> Path | None:
    """Return where compiled code of the sources in a folder is kept, None where nothing can be.

    It goes by their contents: numba's own cache looks at the file of a function alone, and would run what a change
    of another file has made stale.
    """
    home = os.environ.get("HOME")
    base = os.environ.get("XDG_CACHE_HOME") or (home and f"{home}/.cache")
    sources = b"".join(source.read_bytes() for source in sorted(room.glob("*.py")))
    folder = Path(base or "", "quire", "attention", sha256(sources).hexdigest()[:16])
    with suppress(OSError):
        if base:
            folder.mkdir(parents=True, exist_ok=True)
    return folder if base and os.access(folder, os.W_OK) else None


def compiled(function: Callable[..., None]) -> Callable[..., None]:
    """Compile for all cores, or take the code from a process before."""
    folder = code_folder(Path(__file__).parent)
    kept, config.CACHE_DIR = config.CACHE_DIR, str(folder or "")
    try:
        return njit(parallel=True, fastmath=MATHS, cache=folder is not None)(function)
    finally:
        config.CACHE_DIR = kept


def use_threads(wanted: int) -> int:
    """Have compiled code use as many threads as wanted, or as there are; return how many."""
    threads = min(wanted, config.NUMBA_NUM_THREADS)
    set_num_threads(threads)
    return threads
