"""Cutting calls off: an exception is raised before any bytecode of the core that one chooses."""

import gc
import sys
from pathlib import Path

import quire
from quire.errors import InvariantError, QuireError

QUIRE = Path(quire.__file__).parent
ROOMS = tuple(str(QUIRE / room) for room in ("core", "exchange", "ops", "slots"))


class Cut:
    """Raises an error before bytecode number `at` of a call; without one it counts them."""

    def __init__(self, at=None, error=KeyboardInterrupt):
        self.at = at
        self.error = error
        self.count = 0

    def trace(self, frame, event, _arg):
        if event == "call":
            code = frame.f_code
            if not code.co_filename.startswith(ROOMS) or code.co_name == "__del__":
                return None  # what is raised in a `__del__` reaches nobody
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            self.count += 1
            if self.count == self.at:
                raise self.error
        return self.trace

    def run(self, call):
        """Make a call; return whether the cut fell into it."""
        before = sys.gettrace()
        gc.disable()
        sys.settrace(self.trace)
        try:
            call()
        except self.error:
            return True
        except QuireError as error:
            if isinstance(error, InvariantError):
                raise
            return False  # refused, as it may be
        finally:
            sys.settrace(before)
            gc.enable()
        return False
