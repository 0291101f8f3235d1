"""The engine on its thread: news for many readers, and nothing left of those that went away."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from loop_help import GREEDY, nothing_held, plain_answer, tiny_model

from quire.engines.loop import AsyncEngine, Engine, SamplingParams, async_engine
from quire.errors import CacheBusy, ConfigError, RequestFailed, TokensError

PROMPT = tuple(range(10, 30))
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture
def model():
    return tiny_model("llama")


@pytest.fixture
def served(model):
    served = AsyncEngine(Engine(model, num_blocks=60, block_size=4, debug_nan=True))
    yield served
    served.close()
    nothing_held(served.engine)


class Sixth:
    """The sixth forward of a model waits until it goes on."""

    def __init__(self, forward):
        self.forward, self.goes_on, self.num_done = forward, threading.Event(), 0

    def __call__(self, **arguments):
        if self.num_done == 5:
            self.goes_on.wait()
        self.num_done += 1
        return self.forward(**arguments)


@pytest.fixture
def sixth(model, monkeypatch):
    made = Sixth(model.forward)
    monkeypatch.setattr(model, "forward", made)
    return made


async def last(outputs):
    """The last output of a generator."""
    return [output async for output in outputs][-1]


def test_many_requests_are_answered_at_once(served, model):
    async def ask():
        prompts = [(*PROMPT, n) for n in range(3, 15)]
        outputs = await asyncio.gather(*[last(served.generate(each, GREEDY)) for each in prompts])
        for prompt, output in zip(prompts, outputs, strict=True):
            assert tuple(output.outputs[0].token_ids) == plain_answer(model, prompt, 8)

    asyncio.run(ask())


def test_news_come_one_after_another_and_grow(served):
    async def ask():
        lengths = [len(each.outputs[0].token_ids) async for each in served.generate(PROMPT, LONG)]
        assert lengths == sorted(set(lengths))
        assert lengths[-1] == 100

    asyncio.run(ask())


def test_news_of_a_step_are_told_though_the_next_one_takes_long(served, sixth):
    async def ask():
        outputs = served.generate(PROMPT, LONG)
        async for output in outputs:
            if len(output.outputs[0].token_ids) == 5:
                break
        sixth.goes_on.set()
        assert len((await last(outputs)).outputs[0].token_ids) == 100

    try:
        asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        sixth.goes_on.set()


def test_first_news_are_heard_before_the_next_step_is_planned(served, monkeypatch):
    monkeypatch.setattr(async_engine, "HEARD_S", 20)
    plan, num_heard, heard_at_plans = served.engine.scheduler.plan, 0, []

    def noted(now):
        heard_at_plans.append(num_heard)
        return plan(now)

    monkeypatch.setattr(served.engine.scheduler, "plan", noted)

    async def ask():
        nonlocal num_heard
        async for _ in served.generate(PROMPT, LONG):
            num_heard += 1

    asyncio.run(ask())
    assert heard_at_plans[:2] == [0, 1]


def test_a_slow_reader_gets_the_last_news_only(served):
    async def ask():
        outputs = served.generate(PROMPT, LONG)
        await anext(outputs)
        while await served.call(lambda engine: engine.has_unfinished()):
            pass
        rest = [len(each.outputs[0].token_ids) async for each in outputs]
        assert rest == [100]

    asyncio.run(ask())


def test_a_reader_that_goes_away_aborts_its_request(served):
    async def ask():
        outputs = served.generate(PROMPT, LONG)
        await anext(outputs)
        await outputs.aclose()
        await served.call(nothing_held)

    asyncio.run(ask())


def test_closing_an_event_loop_aborts_its_requests(served, sixth):
    loop, outputs = asyncio.new_event_loop(), served.generate(PROMPT, LONG)
    try:
        loop.run_until_complete(anext(outputs))
    finally:
        loop.close()
        sixth.goes_on.set()

    async def ask():
        while await served.call(lambda engine: engine.has_unfinished()):
            pass

    asyncio.run(ask())
    assert sixth.num_done < 10
    del outputs  # which was open until now


@pytest.mark.cases(2)
@pytest.mark.parametrize("leaves", ["closed", "read", "dropped"])
def test_a_late_reader_ends_no_later_request_of_the_same_id(served, model, leaves):
    async def ask():
        behind = served.generate(PROMPT, GREEDY, request_id="a")
        await anext(behind)
        while await served.call(lambda engine: engine.has_unfinished()):
            pass
        later = served.generate(PROMPT[:9], LONG, request_id="a")
        await anext(later)
        if leaves == "closed":
            await behind.aclose()
        elif leaves == "read":
            await last(behind)
        del behind
        with pytest.raises(TokensError):
            await anext(served.generate([], GREEDY, request_id="b"))
        assert len((await last(later)).outputs[0].token_ids) == 100

    asyncio.run(asyncio.wait_for(ask(), 60))


@pytest.mark.parametrize("waits", [True, False])
def test_a_reader_is_told_that_a_call_aborted_its_request(served, waits):
    async def ask():
        outputs = served.generate(PROMPT, LONG, request_id="a")
        await anext(outputs)
        reading = asyncio.create_task(last(outputs)) if waits else None
        await asyncio.sleep(0.01 if waits else 0)
        await served.call(lambda engine: engine.abort("a"))
        with pytest.raises(RequestFailed, match="'a' was aborted"):
            await (reading or last(outputs))

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_a_cancelled_reader_aborts_its_request(served):
    async def ask():
        task = asyncio.create_task(last(served.generate(PROMPT, LONG)))
        while not await served.call(lambda engine: engine.manager.num_active):
            pass
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.call(nothing_held)

    asyncio.run(ask())


def test_refusals_are_raised_where_the_request_was_made(served):
    async def ask():
        with pytest.raises(TokensError, match="empty"):
            await anext(served.generate([], GREEDY))
        with pytest.raises(ZeroDivisionError):
            await served.call(lambda engine: 1 // 0)
        await served.call(nothing_held)

    asyncio.run(ask())


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    "error", [StopIteration(3), asyncio.CancelledError(), SystemExit(1), KeyboardInterrupt()]
)
def test_whatever_a_call_raises_is_raised_there_and_nowhere_else(served, error):
    def fail(engine):
        raise error

    async def ask():
        beside = asyncio.create_task(last(served.generate(PROMPT, LONG)))
        with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
            await served.call(fail)
        assert len((await beside).outputs[0].token_ids) == 100

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_a_failure_of_the_model_is_raised_from_the_generators_of_that_step(
    served, model, monkeypatch
):
    forward = model.forward

    def fail(input_ids=None, **arguments):
        if (input_ids == 77).any():
            raise RuntimeError("no such number")
        return forward(input_ids=input_ids, **arguments)

    monkeypatch.setattr(model, "forward", fail)

    async def ask():
        with pytest.raises(RequestFailed, match="no such number"):
            await last(served.generate([*PROMPT, 77], GREEDY))
        output = await last(served.generate(PROMPT, GREEDY))
        assert tuple(output.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)

    asyncio.run(ask())


def test_others_are_answered_while_a_grammar_is_compiled(served, model, monkeypatch):
    ready, begun = threading.Event(), threading.Event()
    monkeypatch.setattr(served.engine, "prepare", lambda _: begun.set() or ready.wait(60))
    guided = SamplingParams(structured_outputs={"regex": "a"})

    async def ask():
        waits = asyncio.create_task(last(served.generate(PROMPT, guided)))
        await asyncio.to_thread(begun.wait, 60)
        output = await last(served.generate(PROMPT, GREEDY))
        assert not waits.done()
        ready.set()
        with pytest.raises(ConfigError, match="tokenizer"):
            await waits
        return output

    output = asyncio.run(ask())
    assert tuple(output.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)


def test_an_engine_is_not_closed_from_within_a_call(served, model):
    async def ask():
        with pytest.raises(ConfigError, match=r"call stop\(\)"):
            await served.call(lambda _: served.close())
        return await last(served.generate(PROMPT, GREEDY))

    assert tuple(asyncio.run(ask()).outputs[0].token_ids) == plain_answer(model, PROMPT, 8)


def test_call_runs_its_function_on_the_engines_thread(served):
    async def ask():
        assert await served.call(lambda engine: threading.current_thread().name) == "quire-engine"

    asyncio.run(ask())


def test_readers_get_an_error_when_the_engine_is_closed(model):
    served = AsyncEngine(Engine(model, num_blocks=60, block_size=4))

    async def ask():
        task = asyncio.create_task(last(served.generate(PROMPT, LONG)))
        while not await served.call(lambda engine: engine.manager.num_active):
            pass
        assert served.is_alive
        await asyncio.to_thread(served.close)
        assert not served.is_alive
        with pytest.raises(RequestFailed, match="closed"):
            await task
        with pytest.raises(RequestFailed, match="closed"):
            await served.call(len)

    asyncio.run(ask())
    nothing_held(served.engine)


def test_readers_get_an_error_when_the_engine_breaks_down(model, monkeypatch):
    served = AsyncEngine(Engine(model, num_blocks=60, block_size=4))

    def plan(now):
        raise ValueError("a broken plan")

    async def ask():
        monkeypatch.setattr(served.engine.scheduler, "plan", plan)
        with pytest.raises(RequestFailed, match="broke down, ValueError: a broken plan"):
            await last(served.generate(PROMPT, LONG))
        with pytest.raises(RequestFailed, match="broke down"):
            await served.call(len)

    asyncio.run(ask())


def test_engines_of_one_model_take_turns_with_it(model):
    engines = [AsyncEngine(Engine(model, num_blocks=60, block_size=4)) for _ in range(2)]

    async def ask():
        beside = asyncio.create_task(last(engines[0].generate(PROMPT, LONG)))
        made = await asyncio.to_thread(Engine, model, num_blocks=60)
        outputs = await asyncio.gather(
            *[last(engines[1].generate(PROMPT, GREEDY)) for _ in range(5)]
        )
        outputs += await asyncio.to_thread(made.generate, PROMPT, GREEDY)
        for output in outputs:
            assert tuple(output.outputs[0].token_ids) == plain_answer(model, PROMPT, 8)
        await beside

    plain_answer(model, PROMPT, 8)
    asyncio.run(ask())
    for each in engines:
        each.close()


def test_an_engine_has_one_thread(served):
    with pytest.raises(CacheBusy, match="or one engine for each thread"):
        AsyncEngine(served.engine)
    with pytest.raises(CacheBusy, match="'quire-engine' is using this engine"):
        served.engine.step()
    assert served.is_alive


@pytest.mark.ci
def test_a_process_may_end_while_an_engine_runs():
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from loop_help import tiny_model
from quire.engines.loop import AsyncEngine, Engine, SamplingParams

params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
served = AsyncEngine(Engine(tiny_model("llama"), num_blocks=2000, block_size=4))
outputs = [served.generate([5, 6, 7 + n], params) for n in range(8)]

async def ask():
    for each in outputs:
        await anext(each)

asyncio.new_event_loop().run_until_complete(ask())
"""
    subprocess.run([sys.executable, "-c", script], check=True)
