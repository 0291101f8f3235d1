"""Request logs: the requests that clients sent, one row each, with their prompts in sections."""

from quire_sim.logs.bodies import api_of, sections_of
from quire_sim.logs.rows import Api, LoggedRequest, Section, Unread, TokenUsage

__all__ = ["Api", "LoggedRequest", "Section", "Unread", "TokenUsage", "api_of", "sections_of"]
