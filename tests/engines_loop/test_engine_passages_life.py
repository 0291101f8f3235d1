"""Nothing approximate, and nothing of another tenant, adapter or head, ever reaches a request as exact."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

pytest.importorskip("peft")

from hypothesis import HealthCheck  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from passages_life_help import GIVEN, HEADS, POOL, SCOPES, STATES, Life  # noqa: E402

from quire_passages import (  # noqa: E402
    AllRows,
    CacheCraft,
    Epic,
    KVDeviation,
    NoRows,
    Segments,
)
from turns import lived  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SELECTORS = (
    NoRows(),
    NoRows(),
    Epic(3),
    KVDeviation(0.3, 1),
    KVDeviation(0.3, 2),
    CacheCraft(),
    AllRows(),
)
scopes = st.sampled_from(SCOPES)
segments = st.builds(
    lambda head, order: Segments(head, tuple(POOL.passages[at] for at in order), POOL.question),
    st.sampled_from(HEADS),
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
)
settings_of_passages = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from(["16MiB", "16MiB", "40KiB"]),
        "selector": st.sampled_from(SELECTORS),
        "capture": st.sampled_from([None, None, "contextual", "isolated", "none"]),
        "share_isolated": st.booleans(),
        "warm": st.sampled_from([None, None, "host:1MiB", "disk"]),
        "variants": st.sampled_from([1, 2, 4]),
        "verdicts": st.booleans(),
        "share": st.sampled_from([0.1, 1.0]),
    }
)
measured = st.sampled_from(
    [{"target": None}, {"target": None}, {"target": 0.5}, {"target": 0.5, "prompts": tuple(GIVEN)}]
)


class EngineLife(RuleBasedStateMachine):
    """Requests that never end, to an engine whose model, tenants, tiers and captures come and go."""

    @initialize(
        passages=settings_of_passages,
        measured=measured,
        tiers=st.sampled_from([None, "host", "disk"]),
        write=st.sampled_from(["through", "back", "second_use"]),
        num_tokens=st.sampled_from([120, 200, 600]),
        size=st.sampled_from([2, 4, 8]),
        running=st.sampled_from([1, 2, 4]),
        prefill=st.sampled_from([None, 7, 20]),
        state=st.sampled_from(STATES),
    )
    def begin(self, passages, measured, tiers, write, num_tokens, size, running, prefill, state):
        self.life = Life(
            passages=passages | measured,
            tiers=tiers,
            write=write,
            block_size=size,
            num_blocks=num_tokens // size,
            max_running=running,
            max_prefill_tokens=prefill,
            watermark=0.0,
        )
        self.life.turn(state)

    def _ask(self, data):
        """Ask for passages, for the very tokens of an earlier text, for its beginning, or for what follows it."""
        how = data.draw(st.sampled_from(["passages", "passages", "same", "cut", "on", "split"]))
        options = {
            "max_tokens": data.draw(st.sampled_from([1, 2, 6, 14])),
            "n": data.draw(st.sampled_from([1, 1, 1, 2])),
            "priority": data.draw(st.sampled_from([0, 0, 0, 1, 5])),
        }
        if how == "passages" or not self.life.texts:
            self.life.ask(data.draw(segments), data.draw(scopes), **options)
            return
        tokens, scope = data.draw(st.sampled_from(self.life.texts[-8:]))
        if how == "cut":
            tokens = tokens[: data.draw(st.integers(1, tokens.size))]
        if how == "on":
            tokens = np.append(tokens, POOL.question)
        given = tokens[:70]
        if how == "split" and given.size > 3:
            at = sorted(data.draw(st.lists(st.integers(1, given.size - 1), min_size=2, max_size=3, unique=True)))
            head, *parts = np.split(given, at)
            given = Segments(head, tuple(parts[:-1]), parts[-1])
        self.life.ask(given, data.draw(st.sampled_from([scope, scope, scope, *SCOPES])), **options)

    @rule(data=st.data(), count=st.integers(1, 8))
    def go_on(self, data, count):
        """Compute some steps, with requests that wait all the time."""
        for _ in range(count):
            while len(self.life.asked) < self.life.options["max_running"] + 2:
                before = len(self.life.asked)
                self._ask(data)
                if len(self.life.asked) == before:
                    break
            self.life.step()
            self.life.check()

    @rule(data=st.data())
    def ask(self, data):
        self._ask(data)

    @rule(segments=segments, scope=scopes)
    def capture(self, segments, scope):
        self.life.capture(segments, scope)

    @rule(scope=scopes)
    def allow(self, scope):
        self.life.allow(scope)

    @precondition(lambda self: self.life.asked)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(list(self.life.asked)))
        self.life.engine.abort(name)
        del self.life.asked[name]

    @rule(scope=scopes)
    def purge(self, scope):
        self.life.purge(scope)

    @rule(state=st.sampled_from(STATES))
    def turn(self, state):
        self.life.turn(state)

    @rule(count=st.integers(1, 12), what=st.sampled_from(["fail", "weights"]))
    def arm(self, count, what):
        self.life.arm(count, what)

    @rule(state=st.sampled_from(STATES), stays=st.booleans())
    def restart(self, state, stays):
        self.life.restart(self.life.now if stays else state)

    @precondition(lambda self: self.life.engine.manager.num_cached)
    @rule(count=st.sampled_from([1, 5, 1000]))
    def evict(self, count):
        from quire import ops

        ops.reclaim(self.life.engine.manager, count)

    @precondition(lambda self: self.life.texts)
    @rule(data=st.data())
    def bring_back(self, data):
        self.life.bring_back(*data.draw(st.sampled_from(self.life.texts)))

    @invariant()
    def all_is_exact_that_says_so(self):
        if hasattr(self, "life"):
            self.life.check()

    def teardown(self):
        if hasattr(self, "life"):
            self.life.end()


TestLives, TestManyLives = lived(
    EngineLife,
    3,
    200,
    stateful_step_count=12,
    suppress_health_check=list(HealthCheck),
    deadline=None,
)
