"""Cutting calls off: an exception is raised before any bytecode of the core that one chooses."""

import dis
import gc
import sys
from functools import cache
from pathlib import Path

import quire
from quire.errors import InvariantError, QuireError

QUIRE = Path(quire.__file__).parent
ROOMS = tuple(str(QUIRE / room) for room in ("core", "exchange", "ops", "slots"))


class BytecodeCut:
    """Raises an error before bytecode number `at` of a call in `rooms`; without one it counts them."""

    def __init__(self, at=None, error=KeyboardInterrupt, rooms=ROOMS):
        self.at = at
        self.rooms = rooms
        self.error = error
        self.count = 0

    def trace(self, frame, event, _arg):
        if event == "call":
            code = frame.f_code
            if not code.co_filename.startswith(self.rooms) or code.co_name == "__del__":
                return None  # what is raised in a `__del__` reaches nobody
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode" and self.may_come(frame):
            self.count += 1
            if self.count == self.at:
                raise self.error
        return self.trace

    def may_come(self, frame):
        """Return whether the error may be raised before the bytecode at hand: anywhere."""
        return True

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


class SignalCut(BytecodeCut):
    """Does so only where CPython itself looks for signals: behind a call, and where a function or a turn of a loop begins.

    A `with` statement relies on that: it has taken its lock and knows it, and gives it back and knows that, without such a look.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self._last = {}

    def may_come(self, frame):
        looks, covers = looked_at(frame.f_code)
        last, now = self._last.get(id(frame)), frame.f_lasti
        self._last[id(frame)] = now
        # Raised here it is dealt with by the same handlers as what is raised there.
        return last in looks and covers(last) == covers(now)


@cache
def looked_at(code):
    """Return where in a function CPython looks for signals, and what says which handler covers a place."""
    names = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
    looks = {each.offset for each in dis.get_instructions(code) if each.opname.startswith(names)}
    handlers = dis._parse_exception_table(code)

    def covers(offset):
        return [each.target for each in handlers if each.start <= offset < each.end]

    return looks, covers
