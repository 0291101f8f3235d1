"""What a running cache tells the outside: traces of what it was asked for, logs of its events."""

from quire.observe.event_log import save_events
from quire.observe.recorder import Recorder

__all__ = ["Recorder", "save_events"]
