"""The store of variants, against a small model of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from passages_made import HEAD, A, B, ids, variant

from quire.core import Scope
from quire.errors import ConfigError, PinError
from quire_passages import PassageStore
from turns import lived

ONE, TWO = Scope(salt="one", model="m"), Scope(salt="two", model="m")


def found(store, scope, passage=A, head=HEAD):
    return list(store.variants(scope, ids(*passage), ids(*head)))


def test_a_variant_is_found_in_its_scope_by_all_of_its_ids():
    store = PassageStore("1MiB")
    kept = variant(A, HEAD)
    assert store.put(ONE, kept)
    assert found(store, ONE) == [kept]
    assert found(store, TWO) == []
    assert found(store, Scope(salt="one", model="another")) == []
    assert found(store, Scope(salt="one", model="m", lora="x")) == []
    assert found(store, ONE, A[:-1]) == []
    assert found(store, ONE, [*A[:-1], 7]) == []


def test_a_shared_variant_serves_all_scopes_of_its_model_behind_its_head():
    store = PassageStore("1MiB")
    kept = variant(A, HEAD)
    store.put(ONE, kept, shared=True)
    assert found(store, TWO) == [kept]
    assert found(store, TWO, head=HEAD[:-1]) == []
    assert found(store, Scope(salt="one", model="another")) == []


def test_names_tell_nothing_of_other_captures():
    first = variant(A, HEAD).name
    for _ in range(3):
        variant(B, HEAD)
    assert variant(A, HEAD).name == first
    assert len({first, variant(B, HEAD).name, variant(A, HEAD[:-1]).name}) == 3


def test_what_was_captured_behind_other_passages_is_never_shared():
    store = PassageStore("1MiB")
    with pytest.raises(ConfigError, match="only isolated captures can be shared"):
        store.put(ONE, variant(A, [*HEAD, *B], "contextual"), shared=True)
    assert store.stats.variants == 0


def test_the_same_capture_again_replaces_the_first():
    store = PassageStore("1MiB")
    first, second = variant(A, HEAD), variant(A, HEAD)
    other = variant(A, [*HEAD, *B], "contextual", predecessors=[ids(*B)])
    for each in (first, second, other):
        store.put(ONE, each)
    assert found(store, ONE) == [second, other]
    assert first.kv is None
    store.check()


def test_what_was_used_longest_ago_goes_first_and_pinned_ones_stay():
    size = variant(A, HEAD).num_bytes
    store = PassageStore(3 * size)
    kept = [variant([*A[:-1], last], HEAD) for last in range(4)]
    for each in kept[:3]:
        store.put(ONE, each)
    store.use(kept[0])
    with store.pin([kept[1]]):
        assert store.put(ONE, kept[3])
        assert [each.kv is None for each in kept] == [False, False, True, False]
    assert store.stats.evicted == 1
    store.check()


def test_what_fits_beside_no_pins_is_refused_and_nothing_goes_for_it():
    size = variant(A, HEAD).num_bytes
    store = PassageStore(2 * size)
    first, second = variant(A, HEAD), variant(B, HEAD)
    store.put(ONE, first)
    store.put(ONE, second)
    with store.pin([first]):
        assert not store.put(ONE, variant(A, B, num_bytes=2 * size))
    assert not store.put(ONE, variant(A, B, num_bytes=3 * size))
    assert store.stats.variants == 2
    assert store.stats.refused == 2
    store.check()


def test_a_dropped_variant_has_gone_pinned_or_not():
    store = PassageStore("1MiB")
    kept = variant(A, HEAD)
    store.put(ONE, kept)
    pins = store.pin([kept])
    assert store.drop(kept)
    assert kept.kv is None
    assert not store.drop(kept)
    pins.close()
    with pytest.raises(PinError):
        pins.close()
    store.check()


@pytest.mark.parametrize("capacity", [0, -1, "many", 1.5])
def test_a_capacity_that_is_none_is_refused(capacity):
    with pytest.raises(ConfigError):
        PassageStore(capacity)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_two_passages_are_one_only_when_all_ids_are_equal(one, two):
    store = PassageStore("1MiB")
    one, two = (each[: len(each) // 4 * 4] for each in (one, two))
    first = variant([])
    first.ids = one
    store.put(ONE, first)
    assert bool(store.variants(ONE, two, b"")) is (one == two)


class Machine(RuleBasedStateMachine):
    """Puts, uses, pins, drops; the store never holds more than its bytes, nor lists what has gone."""

    @initialize(capacity=st.integers(200, 2000))
    def begin(self, capacity):
        self.store = PassageStore(capacity)
        self.made, self.pins = [], []

    @rule(
        first=st.integers(0, 3),
        before=st.integers(0, 2),
        size=st.integers(1, 600),
        salt=st.sampled_from([ONE, TWO]),
        shared=st.booleans(),
    )
    def put(self, first, before, size, salt, shared):
        made = variant([first, 9], [before], num_bytes=size)
        held = {each.number for each in self.made if each.kv is not None}
        if self.store.put(salt, made, shared=shared):
            self.made.append(made)
        else:
            assert {each.number for each in self.made if each.kv is not None} == held

    @precondition(lambda self: self.made)
    @rule(which=st.data())
    def use(self, which):
        self.store.use(which.draw(st.sampled_from(self.made)))

    @precondition(lambda self: self.made)
    @rule(which=st.data())
    def pin(self, which):
        self.pins.append(self.store.pin([which.draw(st.sampled_from(self.made))]))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        self.pins.pop().close()

    @precondition(lambda self: self.made)
    @rule(which=st.data())
    def drop(self, which):
        each = which.draw(st.sampled_from(self.made))
        assert self.store.drop(each) is (each.number in self.store._order) or each.kv is None

    @invariant()
    def agrees(self):
        if not hasattr(self, "store"):
            return
        self.store.check()
        assert all(each.pins >= 0 for each in self.made)
        held = set(self.store._order)
        assert {each.number for each in self.made if each.kv is not None} == held


TestMachine, TestMachineLong = lived(Machine, 40, 1000)
