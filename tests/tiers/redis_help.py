"""What several tests of the Redis tier do."""

from quire.tiers.base import Outcome
from quire.tiers.contract.samples import buffers_like, records_of


def get(tier, keys, payload_bytes=1000, timeout_s=5.0):
    """Outcomes; a hit that is not the record of its key fails here."""
    records = records_of(keys, payload_bytes)
    buffers = buffers_like(records)
    outcomes = tier.get(keys, buffers, timeout_s)
    for outcome, buffer, record in zip(outcomes, buffers, records, strict=True):
        assert outcome is not Outcome.HIT or buffer == record
    return outcomes
