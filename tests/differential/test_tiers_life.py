"""Events of the machine below the tiers: the tokens stay right, and records that fit are stored."""

import contextlib
import sys
import time
from pathlib import Path

import pytest
import redis
import torch
from hf_help import make_cache, random_ids
from typer.testing import CliRunner

from quire import ops
from quire.cli.app import app
from quire.engines.tiered.opening import open_stack

sys.path.append(str(Path(__file__).parents[1] / "tiers"))

from file_systems import command, fill, mounted
from processes import forked
from servers import running

from turns import by_turns


def prompt(seed):
    return random_ids(torch.Generator().manual_seed(seed), 90)


def served(model, tiers, seed=3):
    """Generate over new tiers; return the tokens that came from them and what became of the stores."""
    with make_cache(model, tiers=tiers) as cache:
        text = cache.generate(prompt(seed), max_new_tokens=4)
        assert torch.equal(text, model.generate(prompt(seed), max_new_tokens=4))
        assert cache.tiers.drain(20)
        return sum(cache.last.tier_tokens.values()), cache.tiers.stats().tiers[0].stores


def quire(*words):
    """Run a command of quire's in this process, which has what it would import."""
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(params=["tmpfs", "ext4"])
def system(request, tmp_path):
    with mounted(tmp_path, request.param) as path:
        yield path


@pytest.mark.cases(2)
@pytest.mark.parametrize("blocks_left", [0, 8])
def test_on_a_full_file_system_a_cache_serves_with_one_warning(model, system, blocks_left, caplog):
    path = system / "kv"
    path.mkdir()
    fill(system, 4096 * blocks_left)
    with make_cache(model, tiers=[f"disk:{path}?capacity=8MiB"]) as cache:
        for seed in range(3):
            ids = prompt(seed)
            plain = model.generate(ids, max_new_tokens=4)
            for _ in range(2):
                assert torch.equal(cache.generate(ids, max_new_tokens=4), plain)
                ops.clear(cache.manager)
                assert cache.tiers.drain(20)
        assert set(cache.tiers.stats().tiers[0].stores) == {"full"}
    (warning,) = (each.getMessage() for each in caplog.records if each.name.startswith("quire"))
    assert "no room left" in warning
    for words in (("inspect", path), ("cache", "verify", path), ("cache", "evict", path, "--all")):
        assert quire(*words).exit_code == 0


@pytest.mark.cases(1)
def test_records_from_before_the_file_system_was_full_are_found_at_every_start(model, system):
    path = system / "kv"
    tiers = [f"disk:{path}?capacity=8MiB"]
    assert served(model, tiers) == (0, {"stored": 5})
    fill(system)
    assert served(model, tiers) == (80, {})
    assert served(model, tiers, seed=4) == (0, {"stored": 5}), "into places that are there"
    for capacity in ("64MiB", "1MiB"):
        assert served(model, [f"disk:{path}?capacity={capacity}"])[0] == 80
    assert quire("cache", "evict", path, "--to", "24KiB").exit_code == 0
    assert quire("cache", "verify", path).exit_code == 0
    assert served(model, tiers)[0] == 80


@pytest.mark.cases(1)
def test_on_a_read_only_file_system_a_cache_serves_with_one_warning_and_changes_are_refused(
    model, system, caplog
):
    path = system / "kv"
    tiers = [f"disk:{path}?capacity=8MiB"]
    served(model, tiers)
    assert command("mount", "-o", "remount,ro", str(system))
    assert served(model, tiers) == (80, {})
    assert served(model, [f"disk:{system / 'new'}?capacity=8MiB"]) == (0, {})
    assert len(caplog.messages) == 2
    for words in (("inspect", path), ("cache", "verify", path)):
        assert quire(*words).exit_code == 0
    for what in (("--all",), ("--to", "4KiB")):
        refused = quire("cache", "evict", path, *what)
        assert (refused.exit_code, refused.stdout) == (2, "")
        assert refused.stderr.splitlines()[-1].endswith("nothing may be written there")
    assert served(model, tiers) == (80, {}), "nothing was evicted"


def test_a_file_system_that_fails_in_mid_run_costs_stores_and_is_said_once(model, tmp_path, caplog):
    with mounted(tmp_path, "ext4") as system:
        stack = open_stack([f"disk:{system / 'kv'}?capacity=8MiB"], {"gate": False})
        with stack, make_cache(model, tiers=stack) as cache:
            cache.generate(prompt(3), max_new_tokens=4)
            assert stack.drain(20)
            stack.flush()
            assert command("mount", "-o", "remount,abort", str(system))
            for seed in range(4, 10):
                cache.generate(prompt(seed), max_new_tokens=4)
                assert stack.drain(20)
            ops.clear(cache.manager)
            text = cache.generate(prompt(3), max_new_tokens=4)
            assert torch.equal(text, model.generate(prompt(3), max_new_tokens=4))
            assert cache.last.tier_tokens == {"disk": 80}
            report = stack.stats().tiers[0]
            assert (report.stores["stored"], report.reading) == (5, "closed")
            assert report.writing != "closed"
        (warning,) = (each.getMessage() for each in caplog.records if each.name.startswith("quire"))
        assert warning.startswith("disk failed or hung, and is left alone for writing")
        assert served(model, [f"disk:{system / 'kv'}?capacity=8MiB"]) == (80, {})


# -- forks ---------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("write", ["through", "back", "second_use"])
def test_a_forked_process_serves_and_closes_whatever_its_parents_threads_held(
    model, tmp_path, write
):
    tiers = ["host:1MiB", f"disk:{tmp_path / 'kv'}?capacity=8MiB"]
    stack = open_stack(tiers, {"write": write, "gate": False, "busy_share": 1.0})
    cache = make_cache(model, num_blocks=8, tiers=stack)
    plain = [model.generate(prompt(seed), max_new_tokens=4) for seed in range(4)]
    cache.generate(prompt(0), max_new_tokens=4)

    def serve_and_close():
        for seed, text in enumerate(plain):
            assert torch.equal(cache.generate(prompt(seed), max_new_tokens=4), text)
        assert cache.last.tier_tokens == {}
        cache.explain(prompt(0))
        assert str(stack)
        stack.check()
        cache.clear()
        began = time.monotonic()
        cache.close()
        stack.close()
        assert time.monotonic() - began < 10

    host, disk = stack.tiers

    def fork():
        with disk._records.lock, host._lock:
            assert forked(serve_and_close) == 0

    disk._room.lock.run(fork)  # as threads hold locks while another one forks; taken in their order
    assert forked(lambda: None) == 0
    assert stack.drain(20)
    for seed, text in enumerate(plain):
        assert torch.equal(cache.generate(prompt(seed), max_new_tokens=4), text)
    assert stack.drain(20)
    stack.check()
    cache.close()
    stack.close()
    assert quire("cache", "verify", tmp_path / "kv").exit_code == 0


# -- threads -------------------------------------------------------------------------------


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", ["host", "disk"])
def test_where_the_system_has_no_thread_left_a_cache_serves_and_closes(
    model, tmp_path, monkeypatch, name
):
    tiers = ["host:1MiB"] if name == "host" else []
    stack = open_stack([*tiers, f"disk:{tmp_path}?capacity=8MiB"], {"gate": False})

    def no_thread(self):
        raise RuntimeError("can't start new thread")

    cache = make_cache(model, tiers=stack)
    for is_short in (True, False, True):
        with monkeypatch.context() as patch:
            if is_short:
                patch.setattr("threading.Thread.start", no_thread)
            for seed in range(2):
                text = cache.generate(prompt(seed), max_new_tokens=4)
                assert torch.equal(text, model.generate(prompt(seed), max_new_tokens=4))
                ops.clear(cache.manager)
            assert stack.drain(20)
            if is_short and cache.tiers.stats().tiers[-1].stores:
                cache.close()
                stack.close()
    assert served(model, [f"disk:{tmp_path}?capacity=8MiB"])[0] in (0, 80)
    assert served(model, [f"disk:{tmp_path}?capacity=8MiB"], seed=1) == (80, {})


# -- servers -------------------------------------------------------------------------------

CHANGES = {
    "restarted, and empty": lambda server, ask: server.restart(),
    "flushed": lambda server, ask: ask("FLUSHALL"),
    "full": lambda server, ask: ask("CONFIG SET maxmemory 1 maxmemory-policy noeviction"),
    "small": lambda server, ask: ask("CONFIG SET maxmemory 1200000 maxmemory-policy allkeys-lru"),
    "asking for a password": lambda server, ask: ask("CONFIG SET requirepass p4ss"),
    "out of connections": lambda server, ask: ask("CONFIG SET maxclients 1"),
    "dropping connections": lambda server, ask: ask("CLIENT KILL TYPE normal SKIPME no"),
    "read only": lambda server, ask: ask("REPLICAOF 127.0.0.1 1"),
    "loading for long": lambda server, ask: ask("CLIENT PAUSE 400 ALL"),
    "another database": lambda server, ask: ask("SWAPDB 0 1"),
}


@pytest.mark.cases(2)
@pytest.mark.system("redis-server")
@pytest.mark.parametrize(("change", "is_between"), by_turns(CHANGES, [False, True]))
def test_a_redis_that_changes_in_mid_run_costs_hits_and_nothing_else(
    model, tmp_path, change, is_between
):
    plain = [model.generate(prompt(seed), max_new_tokens=4) for seed in range(4)]
    with running(tmp_path) as server:
        stack = open_stack([server.url], {"gate": False, "busy_share": 1.0, "cool_down_s": 0.05})
        with stack, make_cache(model, tiers=stack) as cache:
            for seed in range(3):
                cache.generate(prompt(seed), max_new_tokens=4)
            assert stack.drain(20)

            def happen():
                with server.client() as client, contextlib.suppress(redis.ConnectionError):
                    CHANGES[change](server, client.execute_command)

            find = stack.find

            def found_and_then(*asked, **words):
                places = find(*asked, **words)
                if happen in pending:
                    pending.remove(happen)
                    happen()
                return places

            pending = [happen]
            if is_between:
                stack.find = found_and_then
            else:
                pending.remove(happen)
                happen()
            for _ in range(2):
                for seed, text in enumerate(plain):
                    ops.clear(cache.manager)
                    assert torch.equal(cache.generate(prompt(seed), max_new_tokens=4), text)
                    assert stack.drain(20)
            assert not pending
            began = time.monotonic()
        assert time.monotonic() - began < 10
