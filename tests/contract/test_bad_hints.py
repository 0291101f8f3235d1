"""Hints and session names that cannot be: refused, and nothing changes."""

import numpy as np
import pytest
from core_help import prefill, rejected, serve
from hints_help import NEVER, Clock, blocks, hinted, make

from quire.core import Hint
from quire.errors import ConfigError, OutOfBlocks

BAD_HINTS = [
    lambda: None,
    lambda: "never",
    lambda: {"reuse": "never"},
    lambda: Hint,
    lambda: Hint("sometimes"),
    lambda: Hint(None),
    lambda: Hint(["never"]),
    lambda: Hint("session"),
    lambda: Hint("session", session_id=""),
    lambda: Hint(session_id=""),
    lambda: Hint(session_id=7),
    lambda: Hint(session_id=b"a"),
    lambda: Hint(session_id=["a"]),
    lambda: Hint(ttl_s=-1, session_id="new"),
    lambda: Hint(ttl_s=0),
    lambda: Hint(ttl_s=float("nan")),
    lambda: Hint(ttl_s=float("inf")),
    lambda: Hint(ttl_s=1e10),
    lambda: Hint(ttl_s="10"),
    lambda: Hint(ttl_s=True),
    lambda: Hint(ttl_s=np.arange(2)),
]


class TestBadHints:
    @pytest.mark.parametrize("bad", range(len(BAD_HINTS)))
    def test_one_that_cannot_be_is_refused_and_changes_nothing(self, bad):
        manager = make("lru", clock=Clock())
        serve(manager, blocks(0, 3), hint=hinted("a"))
        prefill(manager, blocks(1000, 3), hint=NEVER)
        with rejected(manager, ConfigError):
            manager.open([*blocks(0, 3), 7], hint=BAD_HINTS[bad]())
        assert manager.end_session("new") == 0
        assert manager.end_session("a") == 3

    def test_a_time_to_live_needs_a_clock(self):
        manager = make("lru")
        with rejected(manager, ConfigError, "ttl_s", "clock"):
            manager.open(blocks(0, 3), hint=Hint("session", ttl_s=10, session_id="a"))

    @pytest.mark.parametrize("bad", ["", 7, b"a", ["a"]])
    def test_a_session_that_cannot_be_cannot_end(self, bad):
        manager = make("lru")
        serve(manager, blocks(0, 3), hint=hinted("a"))
        with rejected(manager, ConfigError, repr(bad)):
            manager.end_session(bad)

    def test_a_request_that_is_refused_begins_no_session(self):
        manager = make("lru", num_blocks=4)
        with rejected(manager, OutOfBlocks):
            manager.open(blocks(0, 5), hint=hinted("a"))
        assert len(manager.kernel.owners) == 0
