"""What a running cache tells the outside: traces of what it was asked for."""

from quire.observe.recorder import Recorder

__all__ = ["Recorder"]
