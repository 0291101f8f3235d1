"""quire behind vLLM: blocks that lie in quire's tiers. `docs/vllm.md` says how to use it.

arena       memory that vLLM's scheduler and workers share, for payloads on their way
parts       which layer groups there are, and the records of their blocks
prompts     the names of a request's blocks
loading     what the tiers have of a prompt, verified before vLLM hears of it
scheduling  the scheduler's side: it owns the tiers
copying     the workers' side: between their KV caches and the arena
staging     the size of the arena
support     what of vLLM's KV is kept, and its name
figures     what became of the tiers, for metrics
metrics     what vLLM logs and exports
residency   what lies in tiers, told when it comes and when it goes
kv_events   vLLM's KV events of that
connector   `QuireConnector`, by which vLLM calls all that
tier        `QuireTier`, a secondary tier of vLLM's own offloading, which needs none of it

Only `connector`, `tier`, `kv_events`, `support` and `metrics` import vLLM, and only `copying` torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engines.vllm.connector import QuireConnector
    from quire.engines.vllm.tier import QuireTier

__all__ = ["QuireConnector", "QuireTier"]

_MODULES = {"QuireConnector": "connector", "QuireTier": "tier"}


def __getattr__(name: str) -> object:
    """Load the class that vLLM asks for, and vLLM with it."""
    if name not in _MODULES:
        raise AttributeError(f"module 'quire.engines.vllm' has no attribute {name!r}")
    return getattr(import_module(f"quire.engines.vllm.{_MODULES[name]}"), name)
