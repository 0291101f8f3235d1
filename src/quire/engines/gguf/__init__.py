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
declarations  its structures, from its header
building      `quire gguf build`

Needs the extra `gguf`, and a library of llama.cpp: `quire gguf build` makes one.
"""

from quire.engines.gguf.model import GgufModel

__all__ = ["GgufModel"]
