"""Records of a running cache: traces of its requests, logs and streams of its events, and who follows these."""

from quire.observe.event_log import save_events
from quire.observe.following import Following
from quire.observe.mirror import Mirror
from quire.observe.recorder import Recorder
from quire.observe.stream import EventStream

__all__ = ["EventStream", "Following", "Mirror", "Recorder", "save_events"]
