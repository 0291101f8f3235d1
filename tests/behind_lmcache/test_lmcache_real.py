"""The L2 adapter under LMCache's own classes."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("QUIRE_PEERS", REPOSITORY / ".venv-peers"))
SCRIPT = Path(__file__).with_name("lmcache_run.py")
CHECKS = re.findall(r"^def check_(\w+)", SCRIPT.read_text(), re.MULTILINE)


@pytest.mark.skipif(
    not list(ENVIRONMENT.glob("lib/*/site-packages/lmcache")),
    reason=f"no LMCache in {ENVIRONMENT}: `python benchmarks/peers/environment.py lmcache` installs it",
)
def test_the_adapter_holds_its_contract_under_lmcaches_own_classes():
    done = subprocess.run(
        [ENVIRONMENT / "bin/python", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(CHECKS) > 6
    assert json.loads(done.stdout.splitlines()[-1]) == CHECKS
