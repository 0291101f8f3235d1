"""The results of calls of a tier, and its description of itself."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """The result of a call for one key. Everything but `HIT`, `STORED` and `PRESENT` is a miss."""

    HIT = "hit"
    STORED = "stored"
    """The tier has it; from `TierStack.store`: or a tier's queue has taken it, and it is written soon."""
    PRESENT = "present"
    """Stored before, and kept."""
    ABSENT = "absent"
    CORRUPT = "corrupt"
    """Found, but a checksum, a length or the key did not hold; the tier has dropped it."""
    FOREIGN = "foreign"
    """A good record of another size, model or version than the caller reads; it is left alone."""
    UNTRUSTED = "untrusted"
    """A good record that none of the stack's tier keys has signed; it is left alone until its key is put again."""
    FORGED = "forged"
    """It names a tier key of the stack, which has not made it; the tier has dropped it."""
    FULL = "full"
    """No room, and none to be made."""
    TIMEOUT = "timeout"
    """The tier did not answer in time."""
    ERROR = "error"
    """The tier failed: a refused connection, a device error, an answer that is none."""
    SKIPPED = "skipped"
    """Not tried: read-only, switched off after failures, or over a limit."""


class TierStats(msgspec.Struct, frozen=True):
    """Counts of a tier: records held, and results of its calls.

    `num_records`, `num_bytes`  held now, as far as this process knows; -1 where it cannot know
    `capacity_bytes`            the most it keeps; -1 without a limit of its own
    `outcomes`                  how often each `Outcome` was returned, by name
    """

    name: str
    num_records: int
    num_bytes: int
    capacity_bytes: int
    outcomes: dict[str, int]


class ListedRecord(msgspec.Struct, frozen=True):
    """A record as a tier lists it. `age` counts records that were used later; -1 if unknown."""

    key: bytes
    num_bytes: int
    age: int = -1
