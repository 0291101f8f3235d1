"""Operations on a manager that people and engines need rarely.

checks    every invariant, recounted
checked   a pool that checks every block that it gives or takes back
drawing   the state as plain data, and as a picture
explain   why a prompt is cached as far as it is
demoting  blocks that nobody comes back to
dropping  blocks by policy, a prefix, a scope, or all
purging   all of some scopes, pins too
fits      whether a request would get its blocks now
admission a request counted that goes on without room
memory    how full the groups are, capacity between groups
pins      prefixes that stay
tables    single entries of block tables
rollback  a sequence taken back to fewer tokens
"""

from quire.ops.admission import admit
from quire.ops.checked import CheckedPool
from quire.ops.checks import check
from quire.ops.demoting import demote
from quire.ops.drawing import dump, held_notes, snapshot
from quire.ops.dropping import clear, invalidate, reclaim
from quire.ops.explain import Explanation, Segment, explain
from quire.ops.fits import Fit, fits
from quire.ops.memory import Usage, resize, usage
from quire.ops.pins import Pin, block_states, pin
from quire.ops.purging import purge
from quire.ops.rollback import truncate
from quire.ops.tables import blocks_at

__all__ = [
    "CheckedPool",
    "Explanation",
    "Fit",
    "Pin",
    "Segment",
    "Usage",
    "admit",
    "block_states",
    "blocks_at",
    "check",
    "clear",
    "demote",
    "dump",
    "explain",
    "fits",
    "held_notes",
    "invalidate",
    "pin",
    "purge",
    "reclaim",
    "resize",
    "snapshot",
    "truncate",
    "usage",
]
