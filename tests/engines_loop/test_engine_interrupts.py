"""Ctrl-C in the middle of a call of an engine: what it tells later is right, or it says what to do, and is right then."""

from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest
from loop_help import nothing_held, plain_answer, tiny_model
from test_engine_tiers import host_stack

import quire
from cuts import LineCut
from quire.engines.loop import Engine, SamplingParams
from quire.errors import Interrupted
from turns import by_turns, few_rows

pytestmark = pytest.mark.slow
HERE = Path(quire.__file__).parent
WATCHED, LOOP = (str(HERE),), HERE / "engines" / "loop"
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
}


@cache
def model():
    return tiny_model("llama")


class EngineLife:
    """An engine in the middle of some requests, which all go on with parameters of their own."""

    def __init__(self, way):
        options, more = WAYS[way]
        self.stack = host_stack() if way == "tiers" else None
        self.engine = Engine(model(), tiers=self.stack, max_running=8, debug_nan=True, **options)
        self.params = SamplingParams(temperature=0, max_tokens=9, **more)
        self.told = {}
        self.engine.generate(list(PROMPTS[0]), PARAMS)
        self.first, *_ = [self.engine.add_request(p, self.params) for p in PROMPTS]
        for _ in range(4):
            self.step()

    def step(self):
        for output in self.engine.step():
            self.told[output.request_id] = output

    def ask(self):
        self.engine.add_request(TEXT, self.params)

    def generate(self):
        self.engine.generate([TEXT, PROMPTS[1]], self.params)

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
        for output in self.engine.generate([*map(list, PROMPTS), list(TEXT)], self.params):
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
@pytest.mark.parametrize(("way", "call"), by_turns(WAYS, ["step", "ask", "generate", "abort"]))
def test_after_ctrl_c_an_engine_is_right_or_says_what_to_do(call, way, places):
    life = EngineLife(way)
    whole = LineCut(WATCHED)
    assert not whole.run(getattr(life, call))
    life.close()
    for at in whole.places(f"{call} {way}", places):
        right_after(way, call, LineCut(WATCHED, at))


@pytest.mark.ci
@pytest.mark.parametrize(
    ("way", "step"), few_rows([(way, step) for way in WAYS for step in (1, 9)], ("roomy", 9))
)
def test_ctrl_c_on_any_line_of_the_engines_bookkeeping_bars_or_completes_a_step(way, step):
    """By default on each ninth line."""
    books = tuple(str(LOOP / name) for name in ("engine.py", "answers.py"))
    life = EngineLife(way)
    whole = LineCut(books)
    whole.run(life.step)
    life.close()
    assert len(whole.lines) == 2
    for at in range(1, whole.count + 1, step):
        right_after(way, "step", LineCut(books, at))


def right_after(way, call, cut):
    life = EngineLife(way)
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
        assert output.error is None
        right(output)
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
