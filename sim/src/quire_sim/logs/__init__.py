"""Request logs: the requests that clients sent, one row each, with their prompts in sections."""

from quire_sim.logs.bodies import api_of, sections_of
from quire_sim.logs.opening import LOG_FORMATS, LogFile, log_format, open_log
from quire_sim.logs.rows import Api, EngineSteps, LoggedRequest, Section, TokenUsage, Unread

__all__ = [
    "LOG_FORMATS",
    "Api",
    "EngineSteps",
    "LogFile",
    "LoggedRequest",
    "Section",
    "TokenUsage",
    "Unread",
    "api_of",
    "log_format",
    "open_log",
    "sections_of",
]
