"""The storage backend under SGLang's own classes, and what of it needs none of them."""

import os
from pathlib import Path
from threading import Event, Thread

import pytest

from peer_checks import REPOSITORY, assert_checks_hold
from quire.engines.tiered.pages import PageRecords, PageStack, pieces
from quire.tiers import Outcome
from quire.tiers.disk import Disk

ENVIRONMENT = Path(os.environ.get("QUIRE_PEERS", REPOSITORY / ".venv-peers"))
PYTHON = ENVIRONMENT / "bin/python"
HERE = Path(__file__).parent


@pytest.mark.skipif(
    not list(ENVIRONMENT.glob("lib/*/site-packages/sglang")),
    reason=f"no SGLang in {ENVIRONMENT}: `python benchmarks/peers/environment.py sglang` installs it",
)
@pytest.mark.parametrize("script", ["sglang_run.py", "hicache_run.py"])
def test_the_backend_holds_its_contract_under_sglangs_own_classes(script):
    assert_checks_hold(PYTHON, HERE / script, os.environ, "benchmarks/peers")


def records(**facts):
    return PageRecords("kv", 100, 4, "bfloat16", {"weights": "one", **facts})


def test_pages_are_found_by_name_and_by_what_their_kv_is_of(tmp_path):
    payloads = {name: bytes([at]) * 100 for at, name in enumerate("abc")}

    def write(chosen, into):
        for at, payload in zip(chosen, into, strict=True):
            payload[:] = payloads["abc"[at]]

    got = []

    def read(came):
        got.extend(None if each is None else bytes(each) for each in came)

    stack = PageStack([f"disk:{tmp_path}?capacity=1MiB"], {"close_timeout_s": 60})
    assert stack.store(records(), "abc", write) == [Outcome.STORED] * 3
    stack.close()
    stack = PageStack(
        [f"disk:{tmp_path}?capacity=1MiB"], {"load_timeout_s": 30, "lookup_timeout_s": 30}
    )
    assert stack.found(records(), "abxc", contiguous=True) == [True, True, False, False]
    assert stack.found(records(), "abxc", contiguous=False) == [True, True, False, True]
    assert stack.found(records(weights="two"), "abc", contiguous=False) == [False] * 3
    assert stack.load(records(), "axc", read) == [True, False, True]
    assert got == [payloads["a"], None, payloads["c"]]
    stack.close()
    assert stack.load(records(), "abc", read) == [False] * 3


def test_a_wait_for_pages_ends_when_these_are_written(tmp_path, monkeypatch):
    write, asked = Disk.put_sealed, []
    begin = Event()

    def slow(self, *args):
        assert begin.wait(10)
        return write(self, *args)

    def look():
        stack.wait_for(records(), "xab")
        asked.extend(stack.found(records(), "abx", contiguous=True))

    monkeypatch.setattr(Disk, "put_sealed", slow)
    stack = PageStack([f"disk:{tmp_path}?capacity=1MiB"], {"lookup_timeout_s": 10})
    stack.store(records(), "ab", lambda *_: None)
    assert stack.found(records(), "ab", contiguous=True) == [False, False]
    looking = Thread(target=look)
    looking.start()
    begin.set()
    looking.join()
    assert asked == [True, True, False]
    stack.close()
    stack.wait_for(records(), "ab")


def test_pages_are_copied_in_pieces_of_bounded_memory():
    assert pieces(5, 40 << 20) == [range(1), range(1, 2), range(2, 3), range(3, 4), range(4, 5)]
    assert pieces(5, 30 << 20) == [range(2), range(2, 4), range(4, 5)]
    assert pieces(0, 1) == []
