"""Nothing approximate, and nothing of another tenant, adapter or head, ever reaches a request as exact."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

pytest.importorskip("peft")

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from passages_life_help import GIVEN, HEADS, POOL, SCOPES, Life
from passages_plain_help import STATES

from quire import ops
from quire_passages import (
    AllRows,
    CacheCraft,
    Epic,
    KVDeviation,
    NoRows,
    QuestionRows,
    Segments,
)
from turns import lived

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SELECTORS = (
    NoRows(),
    Epic(3),
    KVDeviation(0.3, 1),
    KVDeviation(0.3, 2),
    QuestionRows(0.33),
    QuestionRows(0.33),
    CacheCraft(),
    AllRows(),
)
selectors = st.sampled_from(SELECTORS)
kept = st.one_of(
    st.just({"capture": "contextual"}),
    st.fixed_dictionaries(
        {
            "capture": st.sampled_from(["isolated", "isolated", "none"]),
            "share_isolated": st.booleans(),
            "warm": st.sampled_from([None, "host:1MiB", "disk"]),
        }
    ),
)
measured = st.one_of(
    st.builds(lambda each: {"selector": each, "target": None}, selectors),
    st.builds(lambda each: {"selector": each, "target": None}, selectors),
    st.fixed_dictionaries(
        {
            "selector": st.none() | selectors,
            "target": st.just(0.5),
            "prompts": st.sampled_from([(), tuple(GIVEN)]),
            "verdicts": st.booleans(),
        }
    ),
)
passages_drawn = st.builds(
    lambda kept, measured, **given: {**given, **kept, **measured},
    kept,
    measured,
    capacity=st.sampled_from(["16MiB", "16MiB", "40KiB"]),
    variants=st.integers(1, 3),
    share=st.sampled_from([0.1, 1.0]),
    worth=st.sampled_from([10.0, 10.0, 10.0, None]),
)
engines = st.builds(
    lambda tokens, size, **given: {"num_blocks": tokens // size, "block_size": size, **given},
    st.sampled_from([600, 200, 120]),
    st.sampled_from([4, 2, 8]),
    tiers=st.sampled_from([None, "host", "disk"]),
    write=st.sampled_from(["through", "back", "second_use"]),
    max_running=st.sampled_from([2, 1, 4]),
    max_prefill_tokens=st.sampled_from([None, 7, 20]),
    watermark=st.just(0.0),
)
HAPPENINGS = {
    "arm": 3,
    "capture": 3,
    "turn": 3,
    "restart": 1,
    "abort": 1,
    "allow": 1,
    "purge": 2,
    "evict": 1,
    "bring_back": 1,
}
happenings = st.sampled_from([each for each, count in HAPPENINGS.items() for _ in range(count)])


class EngineLife(RuleBasedStateMachine):
    """Requests that never end, to an engine whose model, tenants, tiers and captures come and go.

    It finds blended K and V in the tree or in captures, captures of another tenant, adapter, head or text that are
    placed, and those of a model that has changed meanwhile.
    """

    @initialize(
        data=st.data(), passages=passages_drawn, engine=engines, state=st.sampled_from(STATES)
    )
    def begin(self, data, passages, engine, state):
        self.life = Life(passages=passages, **engine)
        self.life.turn(state)
        scopes = data.draw(st.lists(st.sampled_from(SCOPES), min_size=2, max_size=2, unique=True))
        self.scopes = st.sampled_from(scopes)
        others = data.draw(st.lists(st.sampled_from(STATES), min_size=1, max_size=2))
        self.states = st.sampled_from([state, *others])
        heads = HEADS[: data.draw(st.integers(1, 2))] if data.draw(st.booleans()) else HEADS[1:]
        if passages["target"] is not None and data.draw(st.booleans()):
            self.life.allow(scopes[0])
        first = Segments(heads[0], POOL.passages, POOL.question)
        for scope in scopes:  # from here on there is something to place
            if passages["capture"] == "none":
                self.life.capture(first, scope)
            else:
                self.life.ask(first, scope, 1)
        self._rest()
        self.segments = st.builds(
            lambda head, order: Segments(
                head, tuple(POOL.passages[at] for at in order), POOL.question
            ),
            st.sampled_from(heads),
            st.lists(st.integers(0, 3), min_size=2, max_size=4, unique=data.draw(st.booleans())),
        )

    @rule(data=st.data(), count=st.integers(4, 16))
    def go_on(self, data, count):
        """Compute some steps, with requests that wait all the time."""
        for _ in range(count):
            while len(self.life.asked) < self.life.options["max_running"] + 1:
                before = len(self.life.asked)
                self._ask(data)
                if len(self.life.asked) == before:
                    break
            if data.draw(st.integers(0, 7)) == 7:
                self._happen(data)
            self.life.step()
            self.life.check()

    @rule(data=st.data(), count=st.integers(2, 6))
    def come_to_rest(self, data, count):
        """Answer some requests, and what they leave to be captured or compared."""
        for _ in range(count):
            self._ask(data)
        self._rest()

    @rule(data=st.data())
    def happen(self, data):
        self._happen(data)

    def _happen(self, data):
        """Have something happen between two steps."""
        life = self.life
        what = data.draw(happenings)
        if what == "arm":
            life.arm(data.draw(st.integers(1, 30)), data.draw(st.sampled_from(["weights", "fail"])))
        elif what == "capture":
            life.capture(data.draw(self.segments), data.draw(self.scopes))
        elif what == "abort" and life.asked:
            life.abort(data.draw(st.sampled_from(list(life.asked))))
        elif what == "evict" and life.engine.manager.num_cached:
            ops.reclaim(life.engine.manager, data.draw(st.sampled_from([1, 5, 1000])))
        elif what == "turn":
            life.turn(data.draw(self.states))
        elif what == "restart":
            life.restart(data.draw(st.just(life.changing.state) | self.states))
        elif what in ("allow", "purge"):
            getattr(life, what)(data.draw(self.scopes))
        elif what == "bring_back" and life.texts:
            life.bring_back(*data.draw(st.sampled_from(life.texts)))
        life.check()

    def _rest(self):
        for _ in range(60):
            if not self.life.engine.has_unfinished():
                break
            self.life.step()
        self.life.check()

    def _ask(self, data):
        """Ask for passages, for the very tokens of an earlier text, for its beginning, or for what follows it."""
        how = data.draw(st.sampled_from(["passages"] * 5 + ["same", "cut", "on", "split"]))
        options = {
            "max_tokens": data.draw(st.sampled_from([2, 1, 6, 14])),
            "n": data.draw(st.sampled_from([1, 1, 1, 2])),
            "priority": data.draw(st.sampled_from([0, 0, 0, 1, 5])),
        }
        if how == "passages" or not self.life.texts:
            self.life.ask(data.draw(self.segments), data.draw(self.scopes), **options)
            return
        tokens, scope = data.draw(st.sampled_from(self.life.texts[-8:]))
        if how == "cut":
            tokens = tokens[: data.draw(st.integers(1, tokens.size))]
        if how == "on":
            tokens = np.append(tokens, POOL.question)
        given = tokens[:70]
        if how == "split" and given.size > 3:
            cuts = st.lists(st.integers(1, given.size - 1), min_size=2, max_size=3, unique=True)
            head, *parts = np.split(given, sorted(data.draw(cuts)))
            given = Segments(head, tuple(parts[:-1]), parts[-1])
        is_other = data.draw(st.integers(0, 3)) == 3
        self.life.ask(given, data.draw(self.scopes) if is_other else scope, **options)

    def teardown(self):
        if hasattr(self, "life"):
            try:
                self.life.end()
            finally:
                self.life.leave()


TestLives, TestManyLives = lived(
    EngineLife,
    12,
    400,
    stateful_step_count=8,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
