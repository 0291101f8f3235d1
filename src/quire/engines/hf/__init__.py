"""Prefix reuse for Hugging Face `generate`.

cache          PrefixCache: its calls
model_calls    calls to the model: their way, their recording, their reports
request        one call: its sequences, its working cache, and the blocks kept at its end
inputs         a request's arguments, in the forms that callers have, checked
modalities     the place of each image, video or audio in a prompt; `splits` of what processors return
media          the media of a request: their content keys, and the part left to feed; `whole` for some models
recorder       the tokens of these forwards, entered in the working cache
verify         the first calls of each shape, compared with the model alone
storage        pools, tiers below them, saved files
memory         one capacity, split over layer groups
pools          HfStore: a manager and its pools; sequences loaded and kept
static         SlotPrefixCache: the same over slots of fixed shape

`quire.engines.models` has the model's identity, its probe and its working caches.
"""

from quire.engines.hf.cache import PrefixCache
from quire.engines.hf.model_calls import CallReport
from quire.engines.hf.static import SlotPrefixCache, SlotSession
from quire.engines.models.working_cache import WorkingCache

__all__ = ["CallReport", "PrefixCache", "SlotPrefixCache", "SlotSession", "WorkingCache"]
