"""Ctrl-C, or another exception, before any one line of a call."""

import gc
import linecache
import sys
from collections import defaultdict
from functools import cache
from random import Random


@cache
def is_with(name, number):
    """Whether a line begins a `with`: a tracer comes to it again on the way out, between two bytecodes where no signal can come.

    What is raised there leaves the lock taken.
    """
    return linecache.getline(name, number).lstrip().startswith("with ")


class LineCut:
    """Raises an error before line number `at` of a call, counted in files whose paths begin with one of `watched`.

    `error`  its class
    `lines`  the numbers of the lines that were come to, by file
    """

    def __init__(self, watched, at=None, error=KeyboardInterrupt):
        self.watched, self.at, self.error = watched, at, error
        self.count = 0
        self.lines = defaultdict(list)

    def trace(self, frame, event, _arg):
        code = frame.f_code
        if event == "call" and (
            not code.co_filename.startswith(self.watched) or code.co_name == "__del__"
        ):
            return None
        if event == "line" and not is_with(code.co_filename, frame.f_lineno):
            self.count += 1
            self.lines[code.co_filename].append(self.count)
            if self.count == self.at:
                raise self.error
        return self.trace

    def run(self, call):
        """Make the call; return whether the error came out of it."""
        gc.disable()
        sys.settrace(self.trace)
        try:
            call()
        except self.error:
            return True
        finally:
            sys.settrace(None)
            gc.enable()
        return False

    def places(self, seed, num_places):
        """Return so many of the lines that were come to, of as many files as there are."""
        random = Random(seed)
        one_each = [random.choice(lines) for lines in self.lines.values()]
        random.shuffle(one_each)
        left = sorted({*range(1, self.count + 1)} - {*one_each})
        more = random.sample(left, max(min(num_places - len(one_each), len(left)), 0))
        return [*one_each, *more][:num_places]
