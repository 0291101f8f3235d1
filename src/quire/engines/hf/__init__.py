"""Prefix reuse for Hugging Face `generate`.

ledger       which token each column of a working cache was computed from
working      the transformers `Cache` a model computes with: contiguous, growing in place
recorder     forward hooks that fill the ledger
inputs       a request's arguments, checked
modalities   what composite models take besides tokens, split into single items
media        images, video and audio of a request: names, what is left to feed
probe        what a model really caches, found by running it
fingerprint  what binds cached KV to a model: weights and adapters, at each call
store        manager and pool together: load and save sequences
request      one call: its sequences, working cache, and what is kept
report       what one call reused and computed
cache        PrefixCache
static       SlotPrefixCache: the same over slots of fixed shape
"""

from quire.engines.hf.cache import PrefixCache
from quire.engines.hf.report import CallReport
from quire.engines.hf.static import SlotPrefixCache, SlotSession
from quire.engines.hf.working import WorkingCache

__all__ = ["CallReport", "PrefixCache", "SlotPrefixCache", "SlotSession", "WorkingCache"]
