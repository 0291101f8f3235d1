"""Layer groups that need little of a long prefix: sliding windows, chunks, recurrent states.

A kind of your own derives from `quire.core.Kind`, and what it makes from `quire.core.sparse.TableGroup` or
`StateGroup`; one that reads the end of a prefix in another way only from `WindowKind`.
"""

from quire.groups.kinds import ChunkedAttention, Recurrent, SlidingWindow
from quire.groups.snapshots import checkpoint, stops
from quire.groups.windows import WindowKind

__all__ = ["ChunkedAttention", "Recurrent", "SlidingWindow", "WindowKind", "checkpoint", "stops"]
