"""Forecasts of return by callers: the time, the factor it may be wrong by, and the accuracy so far."""

from __future__ import annotations

from math import frexp

import msgspec

LN_2 = 0.6931471805599453

MEMORY = 64
"""Forecasts after which a credit has forgotten half."""

GRANTED = 16.0
"""So many blocks of each kind of request are taken to be found again."""


class Credit(msgspec.Struct, eq=False):
    """The accuracy of forecasts: `right` of `seen`, both decayed so that recent ones weigh more."""

    right: float = 0.0
    seen: float = 0.0

    def note(self, *, right: bool) -> None:
        """Count a forecast that came true, or did not."""
        keep = 1 - 0.7 / MEMORY
        self.right = self.right * keep + right
        self.seen = self.seen * keep + 1


class Found(msgspec.Struct, eq=False):
    """The reuse of stored blocks by kind of request: `found` of `stored` blocks were hit."""

    found: float = GRANTED
    stored: float = GRANTED

    @property
    def share(self) -> float:
        """The share that was found."""
        return self.found / self.stored


class Forecast(msgspec.Struct, eq=False):
    """A return that is expected: in seconds on the manager's clock.

    `first`, `due`, `last`  when it is expected: not before, in the mean, at the latest
    `trust`                 the share of its caller's forecasts that come true
    `kind`, `share`         what is found of what such requests stored, and the share that was, as it began
    """

    first: float
    due: float
    last: float
    trust: float
    credits: tuple[Credit, ...]
    begun: float
    kind: Found
    share: float

    @property
    def held_for(self) -> float:
        """The time until which its blocks are held, longer where fewer of them will be found."""
        return self.begun + (self.due - self.begun) / self.share

    def rank(self, now: float) -> float:
        """Return the expected hits per block and second, if held until the return or the latest time of one."""
        left = self.last - now
        if left <= 0:
            return 0.0
        if now <= self.first:
            wait = self.trust * (self.due - now) + (1 - self.trust) * left
            return self.share * self.trust / wait
        # Of the times that were as likely as each other, on a scale of logarithms, these are left.
        ahead = log((self.last - self.begun) / (now - self.begun))
        all_of_it = log((self.last - self.begun) / (self.first - self.begun))
        right = self.trust * ahead / all_of_it
        right /= right + 1 - self.trust
        wait = left / ahead - (now - self.begun)
        return self.share * right / (right * wait + (1 - right) * left)


def log(x: float) -> float:
    """Return the natural logarithm to seven places, from sums, products and quotients: the same on every machine."""
    mantissa, exponent = frexp(x)
    if mantissa < 2.0**-0.5:
        mantissa, exponent = 2 * mantissa, exponent - 1
    z = (mantissa - 1) / (mantissa + 1)
    square = z * z
    series = 1 + square * (1 / 3 + square * (1 / 5 + square * (1 / 7 + square / 9)))
    return 2 * z * series + exponent * LN_2
