"""quire: the KV cache of LLM inference as a library.

`CacheManager`   the control plane: which blocks hold which tokens (no torch)
`PrefixCache`    a transformers model that never computes the same prefix twice
`KVLayout`, `KVPool`   the tensors behind block ids (torch)
`SlotCache`, `SlotPool`, `SlotPrefixCache`   the same three for contiguous caches: a slot per request
`demo_model`     where the small model is that comes with quire

Importing `quire` imports nothing else; each name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from quire._version import __version__

if TYPE_CHECKING:
    from quire.assets import demo_model
    from quire.core import (
        BlockCopy,
        CacheManager,
        DecodeBatch,
        FullAttention,
        Hint,
        Hit,
        LayerGroup,
        MediaItem,
        Scope,
        Sequence,
        Stats,
    )
    from quire.engines.hf import PrefixCache, SlotPrefixCache
    from quire.errors import QuireError
    from quire.exchange import EventLog, block_hashes
    from quire.foresight import LiveCurve
    from quire.groups import ChunkedAttention, Recurrent, SlidingWindow
    from quire.observe import Recorder
    from quire.ops import Explanation, Pin
    from quire.slots import SlotCache
    from quire.tensors import KVLayout, KVPool, SlotPool

_HOME = {
    "BlockCopy": "quire.core",
    "CacheManager": "quire.core",
    "ChunkedAttention": "quire.groups",
    "LiveCurve": "quire.foresight",
    "DecodeBatch": "quire.core",
    "EventLog": "quire.exchange",
    "Explanation": "quire.ops",
    "FullAttention": "quire.core",
    "Hint": "quire.core",
    "Hit": "quire.core",
    "KVLayout": "quire.tensors",
    "KVPool": "quire.tensors",
    "LayerGroup": "quire.core",
    "MediaItem": "quire.core",
    "Pin": "quire.ops",
    "PrefixCache": "quire.engines.hf",
    "QuireError": "quire.errors",
    "Recorder": "quire.observe",
    "Recurrent": "quire.groups",
    "Scope": "quire.core",
    "Sequence": "quire.core",
    "SlidingWindow": "quire.groups",
    "SlotCache": "quire.slots",
    "SlotPool": "quire.tensors",
    "SlotPrefixCache": "quire.engines.hf",
    "Stats": "quire.core",
    "block_hashes": "quire.exchange",
    "demo_model": "quire.assets",
}

_EXTRA = {"quire.engines.hf": "hf", "quire.tensors": "hf"}

__all__ = [
    "BlockCopy",
    "CacheManager",
    "ChunkedAttention",
    "DecodeBatch",
    "EventLog",
    "Explanation",
    "FullAttention",
    "Hint",
    "Hit",
    "KVLayout",
    "KVPool",
    "LayerGroup",
    "LiveCurve",
    "MediaItem",
    "Pin",
    "PrefixCache",
    "QuireError",
    "Recorder",
    "Recurrent",
    "Scope",
    "Sequence",
    "SlidingWindow",
    "SlotCache",
    "SlotPool",
    "SlotPrefixCache",
    "Stats",
    "__version__",
    "block_hashes",
    "demo_model",
]


def __getattr__(name: str) -> object:
    """Load a public name from the module it lives in."""
    if name not in _HOME:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        extra = _EXTRA.get(_HOME[name])
        if extra is None or (error.name or "").partition(".")[0] == "quire":
            raise
        from quire.extras import lacking  # noqa: PLC0415 - `import quire` imports nothing else

        msg = lacking(f"quire.{name}", str(error.name), extra)
        raise ModuleNotFoundError(msg, name=error.name) from error


def __dir__() -> list[str]:
    return __all__
