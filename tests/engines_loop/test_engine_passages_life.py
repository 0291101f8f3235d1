"""Nothing approximate, and nothing of another tenant, adapter or head, ever reaches a request as exact."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "differential"))

pytest.importorskip("peft")

from hypothesis import HealthCheck  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule  # noqa: E402
from passages_life_help import GIVEN, HEADS, POOL, SCOPES, Life  # noqa: E402
from passages_plain_help import STATES  # noqa: E402

from quire import ops  # noqa: E402
from quire_passages import (  # noqa: E402
    AllRows,
    CacheCraft,
    Epic,
    KVDeviation,
    NoRows,
    QuestionRows,
    Segments,
)
from turns import lived  # noqa: E402

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
settings_of_passages = st.fixed_dictionaries(
    {
        "capacity": st.sampled_from(["16MiB", "16MiB", "40KiB"]),
        "capture": st.sampled_from(["contextual", "contextual", "isolated", "none"]),
        "share_isolated": st.booleans(),
        "warm": st.sampled_from([None, "host:1MiB", "disk"]),
        "variants": st.sampled_from([1, 2, 3]),
        "verdicts": st.booleans(),
        "share": st.sampled_from([0.1, 1.0]),
        "worth": st.sampled_from([10.0, 10.0, 10.0, None]),
    }
)
measured = st.one_of(
    st.builds(lambda each: {"selector": each, "target": None}, st.sampled_from(SELECTORS)),
    st.builds(lambda each: {"selector": each, "target": None}, st.sampled_from(SELECTORS)),
    st.builds(
        lambda each, given: {"selector": each, "target": 0.5, "prompts": given},
        st.sampled_from([None, *SELECTORS]),
        st.sampled_from([(), tuple(GIVEN)]),
    ),
)


class EngineLife(RuleBasedStateMachine):
    """Requests that never end, to an engine whose model, tenants, tiers and captures come and go.

    It finds blended K and V in the tree or in captures, captures of another tenant, adapter, head or text that are
    placed, and those of a model that has changed meanwhile.
    """

    @initialize(
        data=st.data(),
        passages=settings_of_passages,
        measured=measured,
        tiers=st.sampled_from([None, "host", "disk"]),
        write=st.sampled_from(["through", "back", "second_use"]),
        num_tokens=st.sampled_from([600, 200, 120]),
        size=st.sampled_from([4, 2, 8]),
        running=st.sampled_from([2, 1, 4]),
        prefill=st.sampled_from([None, 7, 20]),
        state=st.sampled_from(STATES),
    )
    def begin(
        self, data, passages, measured, tiers, write, num_tokens, size, running, prefill, state
    ):
        if passages["capture"] == "contextual":
            passages = passages | {"warm": None, "share_isolated": False}
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
        some = {"min_size": 2, "max_size": 3, "unique": True}
        scopes = SCOPES
        at = data.draw(st.lists(st.integers(0, len(scopes) - 1), **some))
        self.scopes = st.sampled_from([scopes[each] for each in at])
        self.states = st.sampled_from(data.draw(st.lists(st.sampled_from(STATES), **some)))
        heads = [HEADS[each] for each in data.draw(st.permutations(range(3)))[:2]]
        self.segments = st.builds(
            lambda head, order: Segments(
                head, tuple(POOL.passages[at] for at in order), POOL.question
            ),
            st.sampled_from(heads),
            st.lists(st.integers(0, 3), min_size=2, max_size=4),
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
            self.life.step()
            self.life.check()

    @rule(data=st.data(), count=st.integers(4, 16))
    def keep_on(self, data, count):
        self.go_on(data, count)

    @rule(data=st.data(), count=st.integers(2, 6))
    def come_to_rest(self, data, count):
        """Answer some requests, and what they leave to be captured or compared."""
        for _ in range(count):
            self._ask(data)
        for _ in range(60):
            if not self.life.engine.has_unfinished():
                break
            self.life.step()
        self.life.check()

    @rule(data=st.data())
    def happen(self, data):
        """Have something happen between two steps."""
        life = self.life
        what = data.draw(
            st.sampled_from(
                ["arm", "capture", "abort", "allow", "purge", "evict", "turn", "bring_back"]
                + ["arm", "capture", "turn", "restart"]
            )
        )
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
            life.restart(data.draw(st.sampled_from([life.changing.state])) if data.draw(st.booleans()) else data.draw(self.states))
        elif what in ("allow", "purge"):
            getattr(life, what)(data.draw(self.scopes))
        elif what == "bring_back" and life.texts:
            life.bring_back(*data.draw(st.sampled_from(life.texts)))
        life.check()

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
