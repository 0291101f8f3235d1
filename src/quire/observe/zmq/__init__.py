"""KV events over ZeroMQ, as vLLM publishes them: a publisher of a manager's events, a subscriber to any engine's."""

from quire.observe.zmq.publisher import Publisher, beside
from quire.observe.zmq.subscriber import Subscriber

__all__ = ["Publisher", "Subscriber", "beside"]
