"""Traces: requests as they arrived, from any of the formats people have."""

from quire.sim.trace.files import FORMATS, FileTrace, Format, Report, open_trace
from quire.sim.trace.rows import Trace, TraceRequest

__all__ = ["FORMATS", "FileTrace", "Format", "Report", "Trace", "TraceRequest", "open_trace"]
