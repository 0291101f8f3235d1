"""Traces of tests, opened: the beginnings kept here, and the whole ones where they are at hand."""

from collections.abc import Iterator

from quire_sim.trace import FileTrace, open_trace
from quire_sim.trace.rows import TraceRequest
from traces import head_path, whole_path


def head(name: str) -> FileTrace:
    """Return the first rows of a trace."""
    return open_trace(head_path(name))


def whole(name: str) -> FileTrace:
    """Return a whole trace; skips the test where it is not there."""
    return open_trace(whole_path(name))


class KeptTrace:
    """A trace read once."""

    def __init__(self, name: str) -> None:
        trace = whole(name)
        self.source, self.format, self.block_size = trace.source, trace.format, trace.block_size
        self._requests = list(trace)
        self.num_unique = 1 + max(int(each.blocks.max(initial=-1)) for each in self._requests)

    def __iter__(self) -> Iterator[TraceRequest]:
        return iter(self._requests)
