"""Records of a running cache: traces of its requests, logs and streams of its events, and who follows these."""

from quire.observe.event_log import save_events
from quire.observe.follower import Follower
from quire.observe.mirror import Mirror
from quire.observe.recorder import Recorder
from quire.observe.stream import BatchStream

__all__ = ["BatchStream", "Follower", "Mirror", "Recorder", "save_events"]
