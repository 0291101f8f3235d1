"""Traces: requests as they arrived, from any of the formats people have."""

from quire_sim.trace.coarse import with_block_size
from quire_sim.trace.files import FileTrace
from quire_sim.trace.formats import FORMATS
from quire_sim.trace.opening import open_trace
from quire_sim.trace.rows import Findings, Trace, TraceRequest
from quire_sim.trace.saving import save_trace

__all__ = [
    "FORMATS",
    "FileTrace",
    "Findings",
    "Trace",
    "TraceRequest",
    "open_trace",
    "save_trace",
    "with_block_size",
]
