"""LMCache in a process of its own, in the peers' environment: its storages, a round at a time (`benchmarks/peers/lmcache_rounds.py`).

python benchmarks/peers/environment.py lmcache
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from quire.errors import TierError

sys.path.append(str(Path(__file__).parents[1] / "peers"))
import environment

QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "CUDA_VISIBLE_DEVICES": "",
}
"""No telemetry, no banner, no look for a GPU."""


class LMCache:
    """The process, and one storage at a time. Raises `TierError` where LMCache is not installed or fails."""

    def __init__(self):
        if reason := environment.lacks("lmcache"):
            raise TierError(f"LMCache: {reason}")
        self._process = subprocess.Popen(
            [
                str(environment.python()),
                str(Path(environment.__file__).with_name("lmcache_rounds.py")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | QUIET,
        )

    def open(self, settings, block_bytes, calls, keys_per_call):
        """Open a storage: `settings` as LMCache takes them for an adapter."""
        shape = {"block_bytes": block_bytes, "calls": calls, "keys_per_call": keys_per_call}
        self._ask("open", {"settings": settings} | shape)

    def store(self):
        """Store the blocks of a round under new keys, and return the seconds."""
        return self._ask("store")

    def load(self):
        """Load them, and return the seconds."""
        return self._ask("load")

    def forget(self):
        """Delete them."""
        self._ask("forget")

    def end(self):
        """Close the storage."""
        self._ask("close")

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(60)

    def _ask(self, do, given=None):
        print(json.dumps({"do": do, "with": given}), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise TierError(f"LMCache ended with status {self._process.wait(60)} at {do}")
        answer = json.loads(line)
        if "error" in answer:
            raise TierError(f"LMCache: {do}: {answer['error']}")
        return answer["seconds"]
