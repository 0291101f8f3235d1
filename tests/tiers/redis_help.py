"""Helpers of the tests of the Redis tier."""

from contextlib import contextmanager
from itertools import count

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, records_of
from quire.tiers.redis import Redis

PREFIXES = count()


@contextmanager
def opening(server):
    """Yield what opens tiers of a server, with keys of their own; in the end all are checked and closed."""
    tiers = []

    def open_one(url=server.url, **words):
        words.setdefault("prefix", f"test-{next(PREFIXES)}:")
        tiers.append(Redis(url, **words))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.check()
        tier.close()


def get(tier, keys, payload_bytes=1000, timeout_s=5.0):
    """Outcomes; a hit that is not the record of its key fails here."""
    records = records_of(keys, payload_bytes)
    buffers = buffers_like(records)
    outcomes = tier.get(keys, buffers, timeout_s)
    for outcome, buffer, record in zip(outcomes, buffers, records, strict=True):
        assert outcome is not Outcome.HIT or buffer == record
    return outcomes


def the_server(tier):
    """The connections of a tier that has one server."""
    (server,) = tier._servers._servers.values()
    return server
