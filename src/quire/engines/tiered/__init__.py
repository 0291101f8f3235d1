"""KV that outlives the pool: what engines share that keep blocks in tiers.

parts     which bytes of a block go into one record, and the record's key
search    which of a prompt's blocks the tiers have, and how much of it is of use
cost      what computing a prompt takes, learned from what it took
store     TieredStore: prefixes come back before a request opens, blocks go down after it
saved     a whole cache as a directory

Knows no model library: an engine brings a manager, pools, and a name of what computed them.
"""

from quire.engines.tiered.cost import PrefillCost
from quire.engines.tiered.parts import Origin, Part, make_parts
from quire.engines.tiered.saved import load_saved, save_to
from quire.engines.tiered.search import Search
from quire.engines.tiered.store import Onboarded, TieredStore

__all__ = [
    "Onboarded",
    "Origin",
    "Part",
    "PrefillCost",
    "Search",
    "TieredStore",
    "load_saved",
    "make_parts",
    "save_to",
]
