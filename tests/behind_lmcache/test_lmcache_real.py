"""The L2 adapter under LMCache's own classes."""

import os
from pathlib import Path

import pytest

from peer_checks import REPOSITORY, assert_checks_hold

ENVIRONMENT = Path(os.environ.get("QUIRE_PEERS", REPOSITORY / ".venv-peers"))
SCRIPT = Path(__file__).with_name("lmcache_run.py")


@pytest.mark.skipif(
    not list(ENVIRONMENT.glob("lib/*/site-packages/lmcache")),
    reason=f"no LMCache in {ENVIRONMENT}: `python benchmarks/peers/environment.py lmcache` installs it",
)
def test_the_adapter_holds_its_contract_under_lmcaches_own_classes():
    assert_checks_hold(ENVIRONMENT / "bin/python", SCRIPT, os.environ)
