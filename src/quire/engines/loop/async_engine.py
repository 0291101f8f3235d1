"""An engine on a thread of its own, for callers in event loops."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar, Unpack

from quire.engines.loop.engine import Engine
from quire.engines.loop.outputs import RequestOutput
from quire.engines.loop.params import SamplingParams
from quire.engines.loop.prompts import Prompt
from quire.engines.loop.settings import RequestOptions
from quire.errors import CacheBusy, QuireError, RequestFailed

_T = TypeVar("_T")

SETTLING_S = 0.05
"""So often an engine that has nothing to do looks whether tiers have copied what it holds for them."""


class AsyncEngine:
    """Runs an engine's steps on a thread, as long as there are any; generators of any event loop wait for news.

        async for output in AsyncEngine(engine).generate("Once upon", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

    The engine belongs to that thread from now on: what else is asked of it goes through `call`. `close` ends it.
    Raises `CacheBusy` for an engine that another thread has.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._readers: dict[str, _Reader] = {}
        self._ended: QuireError | None = None
        self._thread = Thread(target=self._run, name="quire-engine", daemon=True)
        self._begun = Event()
        self._thread.start()
        self._begun.wait()
        if self._ended is not None:
            raise self._ended

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests still: it was not closed, and has not broken down."""
        return self._ended is None

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the request's output whenever there is news, the whole of it from its beginning each time.

        Who reads slowly gets the last news only. Whoever leaves the generator, or is cancelled in it, aborts the
        request. Raises what `Engine.add_request` raises, and the error of a request that failed.
        """
        reader = _Reader(asyncio.get_running_loop())

        def enter(engine: Engine) -> None:
            reader.request_id = engine.add_request(prompt, params, request_id=request_id, **options)
            self._readers[reader.request_id] = reader

        def leave(engine: Engine) -> None:
            if self._readers.pop(reader.request_id, None) is reader:
                engine.abort(reader.request_id)

        try:
            await self.call(enter)
            finished = False
            while not finished:
                output = await reader.next()
                if output.error is not None:
                    raise output.error
                finished = output.finished
                yield output
        finally:
            self._calls.put(_Call(leave))

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Return what a function of the engine returns, or raise what it raises; it runs between two steps."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls.put(_Call(function, future))
        if self._ended is not None:
            self._refuse(self._ended)
        return await future

    def stop(self) -> None:
        """Begin to end: when the step that runs is done, whoever waits gets `RequestFailed`."""
        self._calls.put(None)

    def close(self) -> None:
        """Stop, and wait until all is aborted, tiers have what is cached, and the thread has ended."""
        self.stop()
        self._thread.join()

    # -- on the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        ended: QuireError = RequestFailed("the engine was closed; make another one")
        has_turn = self.engine.turn.acquire(blocking=False)
        if not has_turn:
            self._ended = CacheBusy("another thread has this engine; make an engine for each")
        self._begun.set()
        if not has_turn:
            return
        try:
            while self._answer_calls():
                self._deliver(self.engine.step())
        except BaseException as error:  # noqa: BLE001 - whoever waits is to know
            ended = RequestFailed(
                f"the engine broke down, {type(error).__name__}: {error}; make another one"
            )
            ended.__cause__ = error
        self._ended = ended
        self._refuse(ended)
        try:
            if ended.__cause__ is None:
                self.engine.close()  # only now: tiers may take long, and who waits need not
        finally:
            self.engine.turn.release()

    def _answer_calls(self) -> bool:
        """Do what was called for, and wait for calls while nothing runs; return whether to go on."""
        while not (self._calls.empty() and self.engine.has_unfinished()):
            try:
                call = self._calls.get(timeout=None if self.engine.is_settled else SETTLING_S)
            except Empty:
                continue
            if call is None:
                return False
            call.run(self.engine)
        return True

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Hand out news, with one call into each event loop."""
        woken: dict[asyncio.AbstractEventLoop, list[_Reader]] = {}
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue
            if output.finished:
                del self._readers[output.request_id]
            reader.news.append(output)
            woken.setdefault(reader.loop, []).append(reader)
        for loop, readers in woken.items():
            _in_loop(loop, _wake, readers)

    def _refuse(self, error: QuireError) -> None:
        """Tell everyone who waits that the engine has ended."""
        for reader in list(self._readers.values()):
            reader.news.append(error)
            _in_loop(reader.loop, _wake, [reader])
        while True:
            try:
                call = self._calls.get_nowait()
            except Empty:
                return
            if call is not None:
                call.fail(error)


class _Reader:
    """Where a generator waits: the last news of its request, or why there is no more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.request_id = ""
        self.news: deque[RequestOutput | QuireError] = deque(maxlen=1)
        self.awake = asyncio.Event()

    async def next(self) -> RequestOutput:
        """Wait for news."""
        while True:
            await self.awake.wait()
            self.awake.clear()
            if self.news:
                news = self.news.popleft()
                if isinstance(news, QuireError):
                    raise news
                return news


class _Call:
    """A function to run on the engine's thread, and the future that waits for it, if any does."""

    def __init__(
        self, function: Callable[[Engine], Any], future: "asyncio.Future[Any] | None" = None
    ) -> None:
        self._function = function
        self._future = future

    def run(self, engine: Engine) -> None:
        try:
            result = self._function(engine)
        except Exception as error:  # noqa: BLE001 - it is raised where it was called for
            self.fail(error)
        else:
            self._settle("set_result", result)

    def fail(self, error: Exception) -> None:
        self._settle("set_exception", error)

    def _settle(self, how: str, value: Any) -> None:
        future = self._future
        if future is not None:
            _in_loop(
                future.get_loop(), lambda: None if future.done() else getattr(future, how)(value)
            )


def _wake(readers: list[_Reader]) -> None:
    for reader in readers:
        reader.awake.set()


def _in_loop(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any
) -> None:
    """Call a function in an event loop, unless that was closed: nobody waits there then."""
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise
