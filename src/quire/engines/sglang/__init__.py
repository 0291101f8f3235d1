"""quire behind SGLang: a storage backend of its HiCache. `docs/sglang.md` says how to use it.

pages    where the bytes of a page of a host pool lie
storage  `QuireStorage`, by which SGLang calls

Only `storage` imports SGLang.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engines.sglang.storage import QuireStorage

__all__ = ["QuireStorage"]


def __getattr__(name: str) -> object:
    """Load the backend, and SGLang with it, when it is asked for."""
    if name != "QuireStorage":
        raise AttributeError(f"module 'quire.engines.sglang' has no attribute {name!r}")
    from quire.engines.sglang.storage import QuireStorage  # noqa: PLC0415 - it needs SGLang

    return QuireStorage
