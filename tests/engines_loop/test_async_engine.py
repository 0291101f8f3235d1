"""The engine on its thread: news for many readers, and nothing left of those that went away."""

import asyncio
import threading
import time
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from loop_help import GREEDY, LONGEST, nothing_held, plain_answer, tiny_model

from quire.engines.loop import AsyncEngine, Engine, SamplingParams, async_engine
from quire.errors import CacheBusy, RequestFailed, TokensError

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


def test_news_of_a_step_are_told_though_the_next_one_takes_long(served, model, monkeypatch):
    forward, goes_on = model.forward, threading.Event()
    num_done = 0

    def slow(**arguments):
        nonlocal num_done
        if num_done == 5:
            goes_on.wait()
        num_done += 1
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", slow)

    async def ask():
        outputs = served.generate(PROMPT, LONG)
        async for output in outputs:
            if len(output.outputs[0].token_ids) == 5:
                break
        goes_on.set()
        assert len((await last(outputs)).outputs[0].token_ids) == 100

    try:
        asyncio.run(asyncio.wait_for(ask(), 60))
    finally:
        goes_on.set()


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


def test_who_closes_the_event_loop_aborts_its_requests(served, model, monkeypatch):
    forward, goes_on, num_done = model.forward, threading.Event(), 0

    def slow(**arguments):
        nonlocal num_done
        if num_done == 5:
            goes_on.wait()
        num_done += 1
        return forward(**arguments)

    monkeypatch.setattr(model, "forward", slow)
    loop, outputs = asyncio.new_event_loop(), served.generate(PROMPT, LONG)
    try:
        loop.run_until_complete(anext(outputs))
    finally:
        loop.close()
        goes_on.set()

    async def ask():
        while await served.call(lambda engine: engine.has_unfinished()):
            pass

    asyncio.run(ask())
    assert num_done < 10
    del outputs  # which was open until now


class Reader(NamedTuple):
    """Who asks one prompt, and what becomes of it after some news; it may hold up its event loop before.

    Those who give their requests one name are refused while it is another's.
    """

    name: str | None
    prompt: int
    max_tokens: int
    after: int
    ends: str
    pause_s: float
    hold_up_s: float


READERS = st.builds(
    Reader,
    st.sampled_from([None, None, "", "a"]),
    st.integers(0, 5),
    st.sampled_from([1, 2, 8, LONGEST]),
    st.integers(0, 4),
    st.sampled_from(["all", "all", "left", "cancelled", "open"]),
    st.sampled_from([0, 0, 0.001, 0.01]),
    st.sampled_from([0, 0, 0.001, 0.01, 0.03]),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loops=st.lists(
        st.tuples(st.lists(READERS, min_size=1, max_size=5), st.sampled_from(["run", "closed"])),
        min_size=1,
        max_size=3,
    ),
)
def test_readers_of_several_loops_are_told_what_is_right(model, loops):
    """In each thread a loop, which ends as it should or is closed while its readers wait."""
    served = AsyncEngine(Engine(model, num_blocks=60, block_size=4, debug_nan=True))
    prompts = [(*PROMPT[: 8 + n], 40 + n) for n in range(6)]
    answers = [plain_answer(model, prompt, LONGEST) for prompt in prompts]
    kept, wrong = [], []

    async def read(reader):
        prompt, right = prompts[reader.prompt], answers[reader.prompt][: reader.max_tokens]
        params = SamplingParams(temperature=0, max_tokens=reader.max_tokens)
        outputs, before, num_news = served.generate(prompt, params, request_id=reader.name), -1, 0
        if reader.ends == "left" and not reader.after:
            await outputs.aclose()
            return
        async for output in outputs:
            got, num_news = tuple(output.outputs[0].token_ids), num_news + 1
            if got != right[: len(got)] or len(got) <= before:
                wrong.append((reader, got, right))
            before = len(got)
            time.sleep(reader.hold_up_s)  # noqa: ASYNC251 - it is to hold up others
            await asyncio.sleep(reader.pause_s)
            if num_news == reader.after and reader.ends == "left":
                await outputs.aclose()
                return
            if num_news == reader.after and reader.ends == "open":
                kept.append(outputs)
                return
        if before != len(right):
            wrong.append((reader, before, right))

    async def all_of(readers):
        tasks = [asyncio.ensure_future(read(reader)) for reader in readers]
        for reader, task in zip(readers, tasks, strict=True):
            if reader.ends == "cancelled":
                asyncio.get_running_loop().call_later(reader.after / 200, task.cancel)
        told = await asyncio.gather(*tasks, return_exceptions=True)
        for reader, error in zip(readers, told, strict=True):
            is_refused = reader.name is not None and "runs already" in str(error)
            if isinstance(error, Exception) and not is_refused:
                wrong.append((reader, error))

    def run(readers, how):
        loop = asyncio.new_event_loop()
        try:
            if how == "closed":
                loop.call_later((1 + readers[0].after) / 200, loop.stop)
                kept.append(loop.create_task(all_of(readers)))
                loop.run_forever()
            else:
                loop.run_until_complete(asyncio.wait_for(all_of(readers), 60))
        except TimeoutError as error:
            wrong.append(error)
        finally:
            loop.set_exception_handler(lambda *_: None)  # tasks that are destroyed
            loop.close()

    threads = [threading.Thread(target=run, args=each) for each in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def rest():
        while await served.call(lambda engine: engine.has_unfinished()):
            pass

    asyncio.run(asyncio.wait_for(rest(), 60))
    kept.clear()
    served.close()
    nothing_held(served.engine)
    assert not wrong


@pytest.mark.parametrize("leaves", ["closed", "read", "dropped"])
def test_who_is_behind_ends_no_later_request_of_the_same_name(served, model, leaves):
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


def test_what_is_called_for_runs_on_the_engines_thread(served):
    async def ask():
        assert await served.call(lambda engine: threading.current_thread().name) == "quire-engine"

    asyncio.run(ask())


def test_whoever_waits_when_the_engine_is_closed_is_told(model):
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


def test_whoever_waits_when_the_engine_breaks_down_is_told(model, monkeypatch):
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
