"""A clock that a test sets."""


class Clock:
    """Seconds that a test sets: `now` is what a call returns."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now
