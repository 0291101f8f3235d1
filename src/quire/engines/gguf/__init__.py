"""GGUF models in quire's engine, computed by llama.cpp on any device that it knows.

    model = GgufModel("model.gguf")
    engine = Engine(model, model.tokenizer(), kv_memory="4GiB", tiers=["disk:./kv"])

model         GgufModel: the file, and what an engine asks of it
forward       a step: residents brought up to it, decoded, their new rows saved
residents     sequences in a context, shared, least recently used ones dropped
host_pool     the manager's blocks, in host memory
context       a context of llama.cpp
state         the bytes of a sequence's state, and rows of tokens in them
library       the shared library: where it is, whether it fits
bindings      libraries of installed Python bindings
declarations  its structures, from its header
building      `quire gguf build`

Needs the extra `gguf`, and a library of llama.cpp: `quire gguf build` makes one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.engines.gguf.model import GgufModel

__all__ = ["GgufModel"]


def __getattr__(name: str) -> object:
    """Load models, and torch with them, when they are asked for."""
    if name != "GgufModel":
        raise AttributeError(f"module 'quire.engines.gguf' has no attribute {name!r}")
    from quire.engines.gguf.model import GgufModel  # noqa: PLC0415 - it needs torch

    return GgufModel
