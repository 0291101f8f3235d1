"""Records of a running cache: traces of its requests, logs of its events."""

from quire.observe.event_log import save_events
from quire.observe.recorder import Recorder

__all__ = ["Recorder", "save_events"]
