"""The connector over tiers with faults, which the environment variable `QUIRE_FAULTS` plans."""

import json
import os

from quire.engines.tiered.opening import open_free
from quire.engines.vllm import connector
from quire.tiers import FaultPlan, Faulty, TierStack, open_tier


def open_faulty(lines, settings):
    with open_free(["host:1MiB"], settings) as checked:
        settings = checked.settings
    plan = FaultPlan(**json.loads(os.environ["QUIRE_FAULTS"]))
    return TierStack(
        [Faulty(open_tier(line), plan, seed=at) for at, line in enumerate(lines)], settings
    )


class FaultyConnector(connector.QuireConnector):
    def _open(self):
        connector.open_free = open_faulty
        return super()._open()
