"""Trace files for tests: the beginnings kept here, and the whole ones where they are at hand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire_sim.trace import FileTrace, open_trace
from quire_sim.trace.rows import TraceRequest

HEADS = Path(__file__).parent / "data" / "traces"
"""The first rows of each trace: enough to read, too few for published numbers."""

WHOLE = Path(__file__).parents[2] / "shared" / "traces"
"""The whole traces: beside the checkout, not part of it."""

CONVERSATION, AGENT, CODING_AGENT = NAMES = (
    "mooncake_conversation",
    "agent_16tok",
    "coding_agent_64tok",
)


def head_path(name: str) -> Path:
    """Return the file with the first rows of a trace."""
    return HEADS / f"{name}.head.jsonl.gz"


def whole_path(name: str) -> Path:
    """Return the file of a whole trace; skips the test where it is not there."""
    path = WHOLE / f"{name}.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.name} is not beside the checkout (looked in {WHOLE})")
    return path


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
