"""Prefix reuse for engines whose cache is contiguous: a slot per running request.

Why not the prefix tree of `radix.py`: a tree of blocks holds every prefix once, and whoever
shares it points there. Slots cannot point: a prefix that two running requests share stands in
both their slots, a content ends at any token, and a free slot's content is overwritten in
place. So the index is a radix tree over whole contents that may hold the same prefix many
times and answers with all slots that do.

index      who starts as a prompt does
contents   what slots hold, and their generations
order      which free slot is given away next
copies     planned copies between slots
handles    what callers get: matches, handles, pins, counts
store      all of the above, without requests
cache      `SlotCache`: the calls that engines make
"""

from quire0.core.slots.cache import SlotCache
from quire0.core.slots.copies import SlotCopy
from quire0.core.slots.handles import SlotHandle, SlotMatch, SlotPin, SlotStats

__all__ = ["SlotCache", "SlotCopy", "SlotHandle", "SlotMatch", "SlotPin", "SlotStats"]
