"""Nothing approximate, and nothing of another tenant, adapter or head, ever reaches a request as exact."""

import sys
from pathlib import Path
from random import Random

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


def some_settings(random):
    """Return settings of passages and of an engine; of a few lives, more kinds than from draws of hypothesis."""
    passages = {
        "capacity": random.choice(["16MiB", "16MiB", "40KiB"]),
        "selector": random.choice(SELECTORS),
        "target": None,
        "variants": random.randint(1, 3),
        "share": random.choice([0.1, 1.0]),
        "worth": random.choice([10.0, 10.0, 10.0, None]),
        "capture": random.choice(["contextual", "contextual", "isolated", "isolated", "none"]),
    }
    if passages["capture"] != "contextual":
        passages["share_isolated"] = random.random() < 0.3
        passages["warm"] = random.choice([None, "host:1MiB", "disk"])
    if random.random() < 0.2:
        passages["selector"] = random.choice([None, *SELECTORS])
        passages["target"] = 0.5
        passages["prompts"] = random.choice([(), tuple(GIVEN)])
        passages["verdicts"] = random.random() < 0.5
    size = random.choice([2, 4, 8])
    return passages, {
        "block_size": size,
        "num_blocks": random.choice([600, 200, 120]) // size,
        "tiers": random.choice([None, "host", "disk"]),
        "write": random.choice(["through", "back", "second_use"]),
        "max_running": random.choice([1, 2, 4]),
        "max_prefill_tokens": random.choice([None, 7, 7, 20]),
        "watermark": 0.0,
    }


HAPPENINGS = {
    "arm": 3,
    "capture": 3,
    "turn": 4,
    "overtake": 3,
    "restart": 1,
    "abort": 1,
    "allow": 1,
    "purge": 2,
    "evict": 1,
    "bring_back": 1,
}
happenings = st.sampled_from([each for each, count in HAPPENINGS.items() for _ in range(count)])


class PassagesLife(RuleBasedStateMachine):
    """Requests that never end, to an engine whose model, tenants, tiers and captures come and go.

    It finds blended K and V in the tree or in captures, captures of another tenant, adapter, head or text that are
    placed, and those of a model that has changed meanwhile.
    """

    @initialize(seed=st.integers(0, 1 << 20))
    def begin(self, seed):
        random = Random(seed)
        passages, engine = some_settings(random)
        self.life = Life(passages=passages, **engine)
        scopes, states = random.sample(SCOPES, 2), random.choices(STATES, k=3)
        heads = random.sample(HEADS, random.choice([1, 2, 2]))
        unique = random.random() < 0.8
        self.scopes, self.states = st.sampled_from(scopes), st.sampled_from(states)
        self.life.turn(states[0])
        if passages["target"] is not None and random.random() < 0.7:
            self.life.allow(scopes[0])
        first = Segments(heads[0], POOL.passages, POOL.question)
        for scope in scopes if random.random() < 0.6 else ():  # then there is something to place
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
            st.lists(st.integers(0, 3), min_size=2, max_size=4, unique=unique),
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
            if data.draw(st.integers(0, 4)) == 4:
                self._happen(data)
            self.life.step()
            self.life.check()

    @rule(data=st.data(), count=st.integers(2, 6))
    def come_to_rest(self, data, count):
        """Answer some requests, and what they leave to be captured or compared."""
        for _ in range(count):
            self._ask(data)
        if data.draw(st.booleans()):
            self._arm(data, 40)
        self._rest()

    @rule(data=st.data())
    def happen(self, data):
        self._happen(data)

    def _happen(self, data):
        """Have something happen between two steps."""
        life = self.life
        what = data.draw(happenings)
        if what == "arm":
            self._arm(data, 10)
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
        elif what == "overtake":
            self._overtake(data)
        elif what == "bring_back" and life.texts:
            life.bring_back(*data.draw(st.sampled_from(life.texts)))
        life.check()

    def _arm(self, data, most):
        what = data.draw(st.sampled_from(["weights", "fail"]))
        self.life.arm(data.draw(st.integers(1, most)), what)

    def _overtake(self, data):
        """Have urgent requests take the place of one whose passages are captured meanwhile."""
        segments, scope = data.draw(self.segments), data.draw(self.scopes)
        self.life.ask(segments, scope, 2)
        self.life.step()
        for _ in range(self.life.options["max_running"]):
            self.life.ask(POOL.question, scope, 2, priority=9)
        self.life.step()
        self.life.capture(segments, scope)

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
            "priority": data.draw(st.sampled_from([0, 0, 1, 5])),
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
    PassagesLife,
    10,
    400,
    stateful_step_count=8,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
