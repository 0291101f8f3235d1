"""Traces: requests as they arrived, from any of the formats people have."""

from quire.sim.trace.coarse import with_block_size
from quire.sim.trace.files import FileTrace
from quire.sim.trace.formats import FORMATS
from quire.sim.trace.opening import open_trace
from quire.sim.trace.rows import Findings, Trace, TraceRequest
from quire.sim.trace.saving import check_ending, save_trace

__all__ = [
    "FORMATS",
    "FileTrace",
    "Findings",
    "Trace",
    "TraceRequest",
    "check_ending",
    "open_trace",
    "save_trace",
    "with_block_size",
]
