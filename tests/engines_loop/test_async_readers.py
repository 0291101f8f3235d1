"""Readers of an engine on its thread: in several event loops, in all ways to read and to leave."""

import asyncio
import threading
import time
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_help import LONGEST, nothing_held, plain_answer, tiny_model

from quire.engines.loop import AsyncEngine, Engine, SamplingParams

PROMPT = tuple(range(10, 30))


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


class Reader(NamedTuple):
    """A client with one prompt, and its end after some news; it may block its event loop before.

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


@pytest.mark.ci
@settings(max_examples=25)
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
