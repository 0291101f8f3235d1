"""An exception in the middle of a call of an engine: what it tells later is right, or it says what to do, and is right then."""

from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from loop_help import nothing_held, plain_answer, tiny_model
from test_engine_tiers import host_stack

import quire
import quire_passages
from cuts import LineCut
from quire.engines.loop import Engine, SamplingParams
from quire.errors import Interrupted, RequestFailed, TokensError
from quire.tensors import copy as copying
from turns import by_turns, few_rows

pytestmark = pytest.mark.slow
HERE = Path(quire.__file__).parent
WATCHED = str(HERE), str(Path(quire_passages.__file__).parent)
LOOP = HERE / "engines" / "loop"
PLACES, LONG = 6, 150
"""So many lines of a call are tried by default, and in the long run."""

TEXT = tuple(range(10, 40))
PROMPTS = [TEXT[:21], (*TEXT[:9], 5, 6), (*TEXT, 7), (8, *TEXT[:13])]
PARAMS = SamplingParams(temperature=0, max_tokens=9)
WAYS = {
    "roomy": ({"num_blocks": 90, "block_size": 4}, {}),
    "forks": ({"num_blocks": 60, "block_size": 16}, {"n": 3}),
    "full": (
        {"num_blocks": 22, "block_size": 4, "max_step_tokens": 23, "max_prefill_tokens": 9},
        {},
    ),
    "guessed": ({"num_blocks": 90, "block_size": 4}, {"speculation": 3}),
    "tiers": ({"num_blocks": 22, "block_size": 4}, {"n": 2}),
    "passages": ({"num_blocks": 90, "block_size": 4}, {}),
    "passages in tiers": ({"num_blocks": 60, "block_size": 4}, {}),
}
PARTS = [list(range(first, first + 14)) for first in (10, 30, 50)]
SEGMENTS = [
    {"segments": [[7, 8, 9], *(PARTS[at] for at in order), [5, 6, *order]]}
    for order in ((0, 1), (1, 2, 0), (2, 0), (0, 1, 2))
]
ERRORS = [KeyboardInterrupt, ZeroDivisionError, TokensError]


@cache
def model():
    return tiny_model("llama")


class EngineLife:
    """An engine in the middle of some requests, which all go on with parameters of their own."""

    def __init__(self, way):
        options, more = dict(WAYS[way][0]), WAYS[way][1]
        self.stack = host_stack() if "tiers" in way else None
        self.prompts = [list(prompt) for prompt in PROMPTS]
        if "passages" in way:
            from passages_help import GATES

            self.prompts = SEGMENTS
            options["passages"] = quire_passages.Passages(
                "64MiB", quire_passages.AllRows(), None, worth=10.0, min_tokens=2, gates=GATES
            )
        self.engine = Engine(model(), tiers=self.stack, max_running=8, debug_nan=True, **options)
        self.params = SamplingParams(temperature=0, max_tokens=9, **more)
        self.told = {}
        self.engine.generate([self.prompts[0]], PARAMS)
        self.first, *_ = [self.engine.add_request(p, self.params) for p in self.prompts]
        for _ in range(4):
            self.step()

    def step(self):
        for output in self.engine.step():
            self.told[output.request_id] = output

    def ask(self):
        self.engine.add_request(TEXT, self.params)

    def generate(self):
        self.engine.generate([TEXT, self.prompts[1]], self.params)

    def abort(self):
        self.engine.abort(self.first)

    def end(self):
        """Go on to the end of all requests, and ask again."""
        for _ in range(300):
            if not self.engine.has_unfinished():
                break
            self.step()
        assert not self.engine.has_unfinished(), "stuck"
        self.again()

    def again(self):
        for output in self.engine.generate([*self.prompts, list(TEXT)], self.params):
            right(output)

    def close(self):
        self.engine.close()
        self.engine.step()  # tells what was ended
        nothing_held(self.engine)
        if self.stack is not None:
            self.stack.close()


def right(output):
    for answer in output.outputs:
        plain = plain_answer(model(), tuple(output.prompt_token_ids), 9)
        is_whole = answer.finish_reason in ("stop", "length")
        assert tuple(answer.token_ids) == plain[: None if is_whole else answer.num_tokens]


@pytest.mark.cases(2)
@pytest.mark.parametrize("places", [PLACES, pytest.param(LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("way", "error", "call"), by_turns(WAYS, ERRORS, ["step", "generate", "ask", "abort"])
)
def test_after_an_exception_an_engine_is_right_or_says_what_to_do(call, way, error, places):
    life = EngineLife(way)
    whole = LineCut(WATCHED)
    assert not whole.run(getattr(life, call))
    life.close()
    for at in whole.places(f"{call} {way}", places):
        right_after(way, call, LineCut(WATCHED, at, error))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "error", "step"),
    few_rows(
        [(way, error, step) for way in WAYS for error in ERRORS for step in (1, 9)],
        ("roomy", KeyboardInterrupt, 9),
        ("passages", TokensError, 9),
    ),
)
def test_an_exception_on_any_line_of_the_engines_bookkeeping_bars_or_completes_a_step(
    way, error, step
):
    """By default on each ninth line."""
    books = tuple(str(LOOP / name) for name in ("engine.py", "answers.py"))
    life = EngineLife(way)
    whole = LineCut(books)
    whole.run(life.step)
    life.close()
    assert len(whole.lines) == 2
    for at in range(1, whole.count + 1, step):
        right_after(way, "step", LineCut(books, at, error))


def right_after(way, call, cut):
    life = EngineLife(way)
    # A forward that raises ends its requests, if these can be ended.
    with suppress(RequestFailed, Interrupted):
        cut.run(getattr(life, call))
    try:
        life.end()
    except Interrupted as error:
        assert "reset()" in str(error)  # noqa: PT017 - an engine that goes on is as good
        with pytest.raises(Interrupted):
            life.engine.add_request([5], PARAMS)
        life.engine.reset()
        assert not life.engine.has_unfinished()
        life.again()
    for output in life.told.values():
        right(output)
        if output.error is not None:
            assert isinstance(output.error, RequestFailed)
            assert isinstance(output.error.__cause__, cut.error)
    life.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_that_was_cut_off_can_be_closed(way):
    life = EngineLife(way)
    whole = LineCut(WATCHED)
    whole.run(life.step)
    life.close()
    for at in whole.places(f"close {way}", PLACES // 2):
        life = EngineLife(way)
        LineCut(WATCHED, at).run(life.step)
        life.close()


def test_a_step_cut_off_by_a_defect_bars_the_engine(monkeypatch):
    life = EngineLife("roomy")
    complete = life.engine.scheduler.complete

    def half(*given):
        complete(*given)
        raise ZeroDivisionError

    monkeypatch.setattr(life.engine.scheduler, "complete", half)
    with pytest.raises(ZeroDivisionError):
        life.engine.step()
    monkeypatch.undo()
    for call in (
        life.engine.step,
        lambda: life.engine.generate([5]),
        lambda: life.engine.abort("0"),
    ):
        with pytest.raises(Interrupted, match=r"ZeroDivisionError: .*call reset\(\)"):
            call()
    life.engine.reset()
    life.again()
    life.close()


@pytest.mark.cases(2)
@pytest.mark.parametrize("options", [{"retain_s": "long"}, {"store_until": "x"}, {"hint": 3}])
def test_a_refused_request_bars_nothing(options):
    life = EngineLife("roomy")
    with suppress(Exception):
        life.engine.add_request([5], PARAMS, **options)
    life.end()
    life.close()


@pytest.mark.cases(2)
def test_a_plan_that_was_made_in_part_plans_no_later_step():
    """One row that stands where the next one of the failed step would is no continuation of it."""
    text = [*PROMPTS[0]]
    whole = [*text, *plain_answer(model(), tuple(text), 9)]
    plans = (str(HERE / "kernels" / "attention" / "plan.py"),)

    def begun():
        engine = Engine(model(), num_blocks=90, block_size=16)
        engine.generate([[*whole, 5, 6, 7]], PARAMS)
        request = engine.add_request(text, PARAMS)
        for _ in range(3):
            engine.step()
        return engine, engine._requests[request].answers[0].num_computed

    engine, _ = begun()
    counted = LineCut(plans)
    counted.run(engine.step)
    for at in range(1, counted.count + 1):
        engine, num_computed = begun()
        LineCut(plans, at, ZeroDivisionError).run(engine.step)
        prompt = whole[: num_computed + 2]
        (output,) = engine.generate([prompt], PARAMS)
        assert output.num_cached_tokens == num_computed + 1
        right(output)


@pytest.mark.cases(2)
@pytest.mark.parametrize("error", ERRORS)
def test_copies_that_were_not_done_bar_the_engine(monkeypatch, error):
    life = EngineLife("roomy")

    def fails(*_):
        raise error

    monkeypatch.setattr(copying, "apply_plan", fails)
    life.engine.add_request([*TEXT[:18], 9], PARAMS)
    with pytest.raises((error, Interrupted)):
        life.step()
    monkeypatch.undo()
    with pytest.raises(Interrupted, match=r"reset\(\)"):
        life.step()
    life.engine.reset()
    life.again()
    life.close()
