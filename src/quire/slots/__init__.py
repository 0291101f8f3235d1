"""Prefix reuse for engines whose cache is contiguous: a slot per running request.

Why not the prefix tree of `quire.core`: a tree of blocks holds every prefix once, and whoever
shares it points there. Slots cannot point: a prefix that two running requests share stands in
both their slots, a content ends at any token, and a free slot's content is overwritten in
place. So the index is a radix tree over whole contents that may hold the same prefix many
times and answers with all slots that do.

cache      `SlotCache`: the calls that engines make
order      the free slot that is given away next, and the slot of a request
contents   tokens, scopes and generations of the slots
sorted     the contents of one scope, findable by prefix
prompts    prompts as keys: tokens, scopes and media of callers, checked
copies     copies planned between slots
handles    matches, handles of running requests, pins, counters
checks     a cache's state recounted, and as data
"""

from quire.slots.cache import SlotCache
from quire.slots.checks import check, snapshot
from quire.slots.copies import SlotCopy
from quire.slots.handles import SlotHandle, SlotMatch, SlotPin, SlotStats

__all__ = [
    "SlotCache",
    "SlotCopy",
    "SlotHandle",
    "SlotMatch",
    "SlotPin",
    "SlotStats",
    "check",
    "snapshot",
]
