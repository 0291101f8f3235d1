"""Tiers below the pools of an engine that knows no model library, and what computing is said to take."""

import threading
import time

import msgspec
import numpy as np
import pytest

from watching import watchers

torch = pytest.importorskip("torch")

from quire import ops  # noqa: E402
from quire.core import CacheManager, FullAttention, LayerGroup, Scope  # noqa: E402
from quire.engines.tiered.cost import PrefillCost  # noqa: E402
from quire.engines.tiered.opening import open_stack  # noqa: E402
from quire.engines.tiered.parts import Origin  # noqa: E402
from quire.engines.tiered.store import TieredStore  # noqa: E402
from quire.errors import ConfigError  # noqa: E402
from quire.groups import SlidingWindow  # noqa: E402
from quire.tensors import KVLayout  # noqa: E402
from quire.tensors.model import GroupLayout, ModelLayout  # noqa: E402
from quire.tensors.payload import ExactForm  # noqa: E402
from quire.tensors.pool import make_pool  # noqa: E402
from quire.tiers.format import DType, new_buffer, read_header, seal  # noqa: E402
from quire.tiers.host.tier import Host  # noqa: E402
from quire.tiers.stack.settings import StackSettings  # noqa: E402
from quire.tiers.stack.stack import TierStack  # noqa: E402

SIZE = 4
KINDS = {"full": FullAttention(), "sliding": SlidingWindow(8)}


class TieredEngine:
    """A loop that writes, for K and V of a token, a number that stands for all tokens up to it."""

    def __init__(self, stack, names=("full",), num_blocks=20, *, later=False, **origin):
        self.later = later
        memory = KVLayout(2, 4, 3, 2, torch.float32, SIZE)
        layout = ModelLayout(
            tuple(GroupLayout(name, KINDS[name], (i,), memory) for i, name in enumerate(names)),
            len(names),
            SIZE,
        )
        writes_back = stack.settings.write == "back"
        groups = [LayerGroup(name, num_blocks, KINDS[name]) for name in names]
        self.manager = CacheManager(
            groups=groups,
            block_size=SIZE,
            watchers=watchers(evictions=writes_back),
            pool=ops.CheckedPool,
        )
        self.names = names
        self.pools = [make_pool(memory, num_blocks, debug_nan=True) for _ in names]
        self.store = TieredStore(
            self.manager, self.pools, layout, stack, Origin(**{"model": "engine", **origin})
        )

    def serve(self, tokens, scope=None):
        """One request; returns what came from tiers, after all that was reused was checked."""
        tokens, manager = np.asarray(tokens, dtype=np.int32), self.manager
        came = self.store.onboard(tokens, scope)
        seq = manager.open(tokens, scope)
        self.store.offloading.settle_for(tokens.size // SIZE + 2, seq.node)
        self.store.spill()
        assert manager.take_copies() == [] or seq.num_cached % SIZE
        num_cached = seq.num_cached // SIZE * SIZE
        self.check(seq, tokens, scope, num_cached)
        ops.truncate(manager, seq, num_cached)
        manager.reserve(seq, tokens.size - num_cached)
        self.store.spill()
        manager.take_copies()
        for group, pool in enumerate(self.pools):
            table = seq.block_ids(group)
            for at in range(num_cached, tokens.size):
                for states in (pool.k, pool.v):
                    states[:, table[at // SIZE], at % SIZE] = named(tokens, at, scope)
        manager.commit(seq, tokens[num_cached:])
        if self.later:
            self.store.offload_later(seq)
        else:
            self.store.offload(seq)
        manager.close(seq)
        ops.check(manager)
        return came.tokens

    def check(self, seq, tokens, scope, num_tokens):
        for group, pool in enumerate(self.pools):
            table = seq.block_ids(group)
            first = max(num_tokens - 8, 0) if self.names[group] == "sliding" else 0
            for at in range(first, num_tokens):
                for states in (pool.k, pool.v):
                    assert (
                        states[:, table[at // SIZE], at % SIZE] == named(tokens, at, scope)
                    ).all()


def named(tokens, at, scope):
    """A number for a prefix, exact in float32."""
    head = bytes(np.asarray(tokens[: at + 1], dtype=np.int32)) + repr(scope).encode()
    import zlib

    return float(zlib.crc32(head) % (1 << 23))


@pytest.fixture
def stack():
    with TierStack([Host("4MiB")], StackSettings(gate=False)) as tiers:
        yield tiers


def run(start, num_tokens):
    return list(range(start, start + num_tokens))


@pytest.mark.cases(2)
@pytest.mark.parametrize("names", [("full",), ("full", "sliding"), ("sliding",)])
@pytest.mark.parametrize("write", ["through", "back"])
def test_any_engine_finds_in_a_tier_what_its_pool_evicted(names, write):
    with TierStack([Host("4MiB")], StackSettings(gate=False, write=write)) as stack:
        engine = TieredEngine(stack, names, num_blocks=9)
        random = np.random.default_rng(0)
        came = 0
        for _ in range(60):
            start = 1000 * int(random.integers(3))
            tokens = run(start, int(random.integers(5, 30)))
            tokens += run(5000 + 1000 * int(random.integers(3)), int(random.integers(0, 5)))
            came += sum(engine.serve(tokens).values())
        assert came > 100


@pytest.mark.parametrize("names", [("full",), ("full", "sliding")])
def test_another_engine_finds_what_the_first_one_computed(stack, names):
    TieredEngine(stack, names).serve(run(0, 30))
    other = TieredEngine(stack, names)
    assert other.serve(run(0, 30), Scope(salt="x")) == {}
    assert other.serve(run(0, 30)) == {"host": 28}
    assert other.serve(run(0, 30)) == {}, "the device has it now"
    assert other.manager.stats.num_requests == 3


@pytest.mark.parametrize("other", [{"model": "else"}, {"dtype": "int8"}])
def test_another_origin_finds_nothing(stack, other):
    TieredEngine(stack).serve(run(0, 30))
    assert TieredEngine(stack, **other).store.held(np.arange(30, dtype=np.int32)) == {}
    assert TieredEngine(stack).store.held(np.arange(30, dtype=np.int32)) == {"host": 28}


@pytest.mark.parametrize(
    "wrong",
    [
        {"fingerprint": bytes(32)},
        {"group": 3},
        {"dtype": DType.INT8},
        {"token_count": SIZE - 1},
    ],
)
def test_a_record_under_the_right_key_that_says_it_is_of_another_part_is_not_read(stack, wrong):
    TieredEngine(stack).serve(run(0, 30))
    (host,) = stack.tiers
    for entry in list(host.scan())[:2]:
        record = new_buffer(entry.num_bytes)
        host.get([entry.key], [record])
        seal(record, msgspec.structs.replace(read_header(record), **wrong))
        host.delete([entry.key])
        assert host.put([entry.key], [record]) == ["stored"]
    other = TieredEngine(stack)
    assert sum(other.serve(run(0, 30)).values()) < 28
    came = TieredEngine(stack).store.onboard(np.arange(30, dtype=np.int32))
    assert came.causes == {"foreign": 2}


def test_only_wanted_blocks_are_encoded(stack, monkeypatch):
    engine = TieredEngine(stack)
    engine.serve(run(0, 30))
    monkeypatch.setattr(engine.store, "_sealed", None)
    engine.serve(run(0, 30))
    engine.serve(run(0, 20))


def test_windows_go_down_where_hits_can_end_and_nowhere_else(stack):
    TieredEngine(stack, ("full", "sliding"), num_blocks=60).serve(run(0, 161))
    num_full = 40
    in_windows = stack.tiers[0].stats().num_records - num_full
    assert 0 < in_windows < num_full / 2


def slowly(monkeypatch, wait):
    """Have every copy out of a pool wait first."""
    copy_out = ExactForm.copy_out

    def copied(*arguments):
        wait()
        copy_out(*arguments)

    monkeypatch.setattr(ExactForm, "copy_out", copied)


def test_blocks_on_their_way_down_are_not_written_meanwhile(stack, monkeypatch):
    slowly(monkeypatch, lambda: time.sleep(0.003))
    engine = TieredEngine(stack, num_blocks=10, later=True)
    random, came = np.random.default_rng(0), 0
    for _ in range(60):
        start = 1000 * int(random.integers(3))
        came += sum(engine.serve(run(start, int(random.integers(5, 30)))).values())
    assert came
    engine.store.offloading.settle()
    ops.check(engine.manager)


def test_queued_blocks_are_held_until_copied_and_found_at_once(monkeypatch):
    go = threading.Event()
    slowly(monkeypatch, go.wait)
    settings = StackSettings(gate=False, lookup_timeout_s=30)
    with TierStack([Host("4MiB")], settings) as stack:
        engine = TieredEngine(stack, later=True)
        engine.serve(run(0, 30))
        (pool,) = engine.manager.pools
        assert pool.num_available == 20 - 7
        assert not stack.drain(0.01)
        threading.Timer(0.05, go.set).start()
        assert TieredEngine(stack).store.held(np.arange(30, dtype=np.int32)) == {"host": 28}
        assert stack.tiers[0].stats().num_records == 7
        engine.store.offloading.settle()
        assert pool.num_available == 20
        ops.check(engine.manager)


def test_a_prompt_without_room_in_the_queue_is_served_and_not_offloaded(stack, monkeypatch):
    engine = TieredEngine(stack, later=True)
    with monkeypatch.context() as patch:
        patch.setattr(stack.feeding, "has_room", lambda most_bytes: False)
        assert engine.serve(run(0, 17)) == {}
        assert engine.manager.num_cached == 17 // SIZE
    engine.serve(run(100, 17))
    assert TieredEngine(stack).serve(run(0, 17)) == {}
    assert TieredEngine(stack).serve(run(100, 17)) == {"host": 16}


def test_a_prefix_that_was_not_offloaded_goes_down_with_the_next_prompt(stack, monkeypatch):
    engine = TieredEngine(stack, later=True)
    monkeypatch.setattr(type(stack.feeding), "_has_time", lambda _: False)
    head = run(0, 8)
    engine.serve(head + run(100, 9))
    first = next(iter(engine.store.offloading._held))
    engine.serve(head + run(200, 9))
    engine.store.offloading._finish(first)
    monkeypatch.undo()
    assert stack.stats().passed_over == 1
    assert TieredEngine(stack).serve(head + run(100, 9)) == {"host": 8}
    assert TieredEngine(stack).serve(head + run(200, 9)) == {"host": 16}


@pytest.mark.parametrize(
    "options", [{"write": "back"}, {"read_only": True}, {"write": "second_use"}]
)
def test_blocks_that_no_tier_wants_yet_are_not_held(options):
    with TierStack([Host("4MiB")], StackSettings(gate=False, **options)) as tiers:
        engine = TieredEngine(tiers, later=True)
        engine.serve(run(0, 17))
        assert not engine.store.offloading._held
        if options == {"write": "second_use"}:
            engine.serve(run(0, 17))
            assert engine.store.offloading._held
            assert TieredEngine(tiers).serve(run(0, 17)) == {"host": 16}


def test_hits_adjust_the_budget_once_the_prefill_cost_is_measured(stack, monkeypatch):
    earned = []
    monkeypatch.setattr(stack.feeding, "adjust_budget", earned.append)
    TieredEngine(stack).serve(run(0, 17))
    TieredEngine(stack).serve(run(0, 17))
    assert [seconds for seconds in earned if seconds > 0] == []
    engine = TieredEngine(stack)
    for _ in range(5):
        engine.store.cost.observe(0, 17, 17.0)
    assert engine.serve(run(0, 17)) == {"host": 16}
    assert 5.0 < earned[-1] < 17.0


def test_an_offload_that_fails_raises_and_holds_no_block(stack, monkeypatch):
    def fail():
        raise MemoryError("no memory")

    slowly(monkeypatch, fail)
    engine = TieredEngine(stack, later=True)
    engine.serve(run(0, 30))
    with pytest.raises(MemoryError, match="no memory"):
        engine.store.offloading.settle()
    assert engine.manager.pools[0].num_available == 20
    engine.store.offloading.settle()
    ops.check(engine.manager)


@pytest.mark.parametrize("options", [{"names": ("full", "sliding")}, {"dtype": "int8"}])
def test_blocks_that_cannot_be_fed_later_are_stored_at_once(stack, options):
    engine = TieredEngine(stack, later=True, **options)
    engine.serve(run(0, 30))
    assert stack.tiers[0].stats().num_records >= 7
    assert all(pool.num_available == pool.num_blocks for pool in engine.manager.pools)


@pytest.mark.parametrize("coefficients", [(0.01, 2e-5, 0.0), (0.002, 1e-5, 3e-9), (0.0, 1e-4, 0.0)])
def test_the_prefill_cost_is_learned_from_observations(coefficients):
    constant, per_token, per_pair = coefficients
    random, cost = np.random.default_rng(1), PrefillCost()

    def seconds(start, stop):
        pairs = (stop - start) * (stop + start) / 2
        return constant + per_token * (stop - start) + per_pair * pairs

    assert cost.seconds(0, 100) > 0.5, "unknown: load, and learn"
    for _ in range(60):
        start = int(random.integers(0, 3000))
        stop = start + int(random.integers(16, 3000))
        cost.observe(start, stop, seconds(start, stop) * random.uniform(0.9, 1.1))
    for start, stop in ((0, 64), (0, 1000), (2000, 2500), (0, 6000)):
        assert cost.seconds(start, stop) == pytest.approx(seconds(start, stop), rel=0.25)
    assert cost.seconds(10, 10) == 0
    cost.observe(0, 10, 0.0)
    cost.observe(10, 10, 1.0)
    assert cost.num_observed == 60


def test_the_prefill_cost_trusts_short_forwards_only_if_recent():
    cost, saved = PrefillCost(), lambda: cost.saved(0, 1568, 1600)
    for _ in range(11):
        cost.observe(0, 1600, 0.15)
    assert saved() == pytest.approx(0.15, rel=0.1), "hits are tried"
    cost.observe(1568, 1600, 0.8)  # other work made it slow
    assert saved() > 0.1
    for _ in range(200):
        cost.observe(1568, 1600, 0.8)
    assert saved() < 0.02
    for _ in range(100):
        cost.observe(0, 1600, 0.15)
    assert saved() > 0.05, "without hits that is doubted again"
    cost.observe(1568, 1600, 0.01)
    assert saved() == pytest.approx(0.14, rel=0.1), "a fast one says that it can be so"


def test_stacks_are_opened_from_words_and_bad_ones_are_refused(tmp_path):
    with open_stack(["host:1MiB", f"disk:{tmp_path}?capacity=8MiB"], {"write": "back"}) as stack:
        assert stack.settings.write == "back"
        assert stack.names == ("host", "disk") or list(stack.names) == ["host", "disk"]
    for tiers, settings in (
        ("host:1MiB", None),
        (["host:1MiB"], {"write": "never"}),
        (["host:1MiB"], {"wrong": 1}),
        ([], None),
    ):
        with pytest.raises(ConfigError):
            open_stack(tiers, settings)
