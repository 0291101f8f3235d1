"""quire behind vLLM: a KV connector whose blocks lie in quire's tiers. `docs/vllm.md` says how to use it.

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
connector   `QuireConnector`, by which vLLM calls all that

Only `connector`, `support` and `metrics` import vLLM, and only `copying` torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engines.vllm.connector import QuireConnector

__all__ = ["QuireConnector"]


def __getattr__(name: str) -> object:
    """Load the connector, and vLLM with it, when it is asked for."""
    if name != "QuireConnector":
        raise AttributeError(f"module 'quire.engines.vllm' has no attribute {name!r}")
    from quire.engines.vllm.connector import QuireConnector  # noqa: PLC0415 - it needs vLLM

    return QuireConnector
