"""Breakers: a server that fails again and again gets requests only from time to time."""

from collections.abc import Callable

AFTER = 3
"""Failures in a row that open a breaker."""

FIRST_S, LONGEST_S = 1.0, 30.0
"""Seconds for which a breaker is open at first, and at most; each trial that fails doubles them."""


class UpstreamBreaker:
    """Whether a server is asked: closed (it is), open (it is not), or half-open (by one trial).

        closed ── AFTER failures in a row ──▶ open ── its seconds pass ──▶ half-open
          ▲                                     ▲                             │
          └──────── an answer ──────────────────┼───────── a failure ─────────┤
          └───────────────────────────────────── an answer ───────────────────┘

    `clock`  seconds that never step back
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.num_opened = 0
        self._clock = clock
        self._num_failed = 0
        self._open_s = FIRST_S
        self._until: float | None = None
        self._trial: object | None = None

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        if self._until is None:
            return "closed"
        return "open" if self._clock() < self._until else "half-open"

    @property
    def allows(self) -> bool:
        """Whether the server is asked."""
        return self._until is None or (self._trial is None and self._clock() >= self._until)

    def asked(self) -> object:
        """Note a request, which is to be given to `left`: a half-open breaker allows no other until then."""
        request = object()
        if self._until is not None:
            self._trial = request
        return request

    def answered(self) -> None:
        """Note an answer."""
        self._num_failed, self._open_s = 0, FIRST_S
        self._until = self._trial = None

    def failed(self) -> None:
        """Note a failure."""
        self._num_failed += 1
        if self._until is not None:
            if self._clock() < self._until:
                return  # of a request that was sent before
            self._open_s = min(2 * self._open_s, LONGEST_S)
        elif self._num_failed < AFTER:
            return
        self.num_opened += 1
        self._until = self._clock() + self._open_s

    def left(self, request: object) -> None:
        """Note that a request has ended, however it did."""
        if self._trial is request:
            self._trial = None
