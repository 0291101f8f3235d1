"""Prefix reuse for Hugging Face `generate`.

ledger       which token each column of a working cache was computed from
layers       K and V of one layer, of full attention or with a window
states       recurrent states of one layer, and copies of them at one position
working      the transformers `Cache` a model computes with: layers of every kind, and a ledger
making       working caches of a model: empty, or of rows that were computed one by one
watched      what the model is fed, seen: by a stand-in for it, and in sessions at its forward
recorder     what of that is entered in the ledger: what was computed from tokens alone
models       what can be the model of a cache, and what pipelines ask of one
inputs       a request's arguments, in the forms that callers have, checked
modalities   where each kind of image, video or audio stands in a prompt
media        the media of a request: what names them, what is left to feed
distance     how far apart numbers are that would be equal but for rounding
probe        what a model really keeps, found by running it
twin         the config of a tiny model of the same kind
battery      requests to such a twin, with quire and without
verify       the first calls of each shape, compared with the model alone
adapters     what PEFT has put around layers
stamps       where tensors lie, and a few of their values
sight        a model at a moment: all that decides its K and V
identity     the name of that, as part of the key of what is computed
memory       one capacity, split over layer groups and moved between them
pools        HfStore: manager and pools together, sequences loaded and kept
keeping      what a cache keeps: pools, tiers below them, saved files
turns        one thread at a time in a cache, seen to
request      the sequences of one call, its working cache, and what is kept
calls        how calls reach the model, and what they report
cache        PrefixCache: what is called
static       SlotPrefixCache: the same over slots of fixed shape
"""

from quire.engines.hf.cache import PrefixCache
from quire.engines.hf.calls import CallReport
from quire.engines.hf.static import SlotPrefixCache, SlotSession
from quire.engines.hf.working import WorkingCache

__all__ = ["CallReport", "PrefixCache", "SlotPrefixCache", "SlotSession", "WorkingCache"]
