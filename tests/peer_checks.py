"""Checks that a script runs in the environment of a peer, and the test that has it run."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def run_checks(script):
    """Run every function `check_NAME` of a script's globals in a folder of its own; print the names as JSON."""
    held = []
    for name, check in list(script.items()):
        if name.startswith("check_"):
            with tempfile.TemporaryDirectory() as place:
                check(Path(place))
            held.append(name.removeprefix("check_"))
            sys.stderr.write(f"{name}\n")
    sys.stdout.write(json.dumps(held) + "\n")


def assert_checks_hold(python, script, environment, *folders):
    """Run a script in a peer's environment; fail unless all its checks held."""
    path = ":".join(str(REPOSITORY / each) for each in ("src", "tests", *folders))
    done = subprocess.run(
        [python, script],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    checks = re.findall(r"^def check_(\w+)", script.read_text(), re.MULTILINE)
    assert len(checks) > 6
    assert json.loads(done.stdout.splitlines()[-1]) == checks
