"""An engine on a thread of its own, for callers in event loops."""

import asyncio
import atexit
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread, current_thread
from typing import Any, TypeVar, Unpack

from quire.engines.loop.answers import RequestOutput
from quire.engines.loop.engine import Engine
from quire.engines.loop.params import SamplingParams
from quire.engines.loop.requests import Prompt, RequestOptions
from quire.engines.purging import PurgeableAsync
from quire.errors import CacheBusy, ConfigError, QuireError, RequestFailed
from quire.kernels.teams import release_team

_T = TypeVar("_T")

HEARD_S = 0.002
"""So long an engine waits at most until first news have been taken on by their readers."""

SETTLING_S = 0.05
"""So often an engine that has nothing to do looks whether tiers have copied what it holds for them."""


class AsyncEngine(PurgeableAsync):
    """Runs an engine's steps on a thread; generators of any event loop receive the outputs.

        async for output in AsyncEngine(engine).generate("Once upon", SamplingParams(max_tokens=64)):
            print(output.outputs[0].text)

    The engine belongs to that thread from then on: use `call` for everything else. `close` ends it, and so does the
    end of the process.
    Raises `CacheBusy` for an engine that another thread has.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._calls: SimpleQueue[tuple[Callable[[Engine], Any], Future[Any]] | None] = SimpleQueue()
        self._readers: dict[str, _Reader] = {}
        self._untold: list[tuple[_Reader, RequestOutput]] = []
        self._ended: QuireError | None = None
        self._compiling = ThreadPoolExecutor(1, "quire-grammar")
        begun: Future[None] = Future()
        release_team()
        self._thread = Thread(target=self._run, args=[begun], name="quire-engine", daemon=True)
        self._thread.start()
        begun.result()
        # A thread that computes while Python ends would take the process down.
        atexit.register(self.close)

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
        request; so does who closes the event loop. Raises what `Engine.add_request` raises, the error of a request
        that failed, and `RequestFailed` for one that a `call` aborted.
        """
        reader = _Reader()
        if params is not None and params.guided and self.is_alive:
            await reader.loop.run_in_executor(self._compiling, self.engine.prepare, params)

        def enter(engine: Engine) -> None:
            reader.request_id = engine.add_request(prompt, params, request_id=request_id, **options)
            self._readers[reader.request_id] = reader

        def entered(answer: Future[None]) -> None:
            if (error := answer.exception()) is not None:
                self._tell([(reader, error)])

        try:
            self._ask(enter).add_done_callback(entered)
            finished = False
            while not finished:
                output = await reader.get()
                if output.error is not None:
                    raise output.error
                finished = output.finished
                yield output
        finally:
            self._ask(partial(self._leave, reader))

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run a function of the engine between two steps; return its result, or raise its exception."""

        def call(engine: Engine) -> _T:
            try:
                return function(engine)
            except StopIteration as error:  # which no coroutine can raise
                raise RuntimeError("what was called for raised StopIteration") from error
            finally:
                self._tell_aborted(engine)

        return await asyncio.wrap_future(self._ask(call))

    def stop(self) -> None:
        """Begin to end: after the running step, readers get `RequestFailed`."""
        self._calls.put(None)

    def close(self) -> None:
        """Stop, and wait until requests are aborted, cached blocks are in the tiers and the thread has ended.

        Raises `ConfigError` within a `call`.
        """
        if current_thread() is self._thread:
            raise ConfigError("close() waits for the engine's thread, which calls it; call stop()")
        self.stop()
        self._thread.join()
        self._compiling.shutdown(wait=False)
        atexit.unregister(self.close)

    def _ask(self, function: Callable[[Engine], _T]) -> Future[_T]:
        answer: Future[_T] = Future()
        self._calls.put((function, answer))
        if self._ended is not None:
            self._refuse(self._ended)
        return answer

    # -- on the thread ---------------------------------------------------------------------

    def _run(self, begun: Future[None]) -> None:
        try:
            with self.engine.guard:
                begun.set_result(None)
                self._serve()
        except CacheBusy as error:
            begun.set_exception(error)

    def _serve(self) -> None:
        """Do steps and calls until the engine is stopped or breaks down; then whoever waits is told."""
        ended = RequestFailed("the engine was closed; make another one")
        self.engine.when_computing(self._tell_others)
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
        if ended.__cause__ is None:
            self.engine.close()  # only now: tiers may take long, and who waits need not

    def _answer_calls(self) -> bool:
        """Do what was called for, and wait for calls while nothing runs; return whether to go on."""
        while not (self._calls.empty() and self.engine.has_unfinished()):
            try:
                called = self._calls.get(timeout=None if self.engine.is_settled else SETTLING_S)
            except Empty:
                continue
            if called is None:
                return False
            function, answer = called
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(function(self.engine))
                except BaseException as error:  # noqa: BLE001 - it is raised where it was called for
                    answer.set_exception(error)
        return True

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand out first and last news of a request at once, and others once the model computes the next step.

        What event loops do with news then costs no time, where it would hold up what comes before. First ones are waited
        for: while the next step is planned, an event loop would get the interpreter now and then only.
        """
        urgent, self._untold = self._untold, []
        heard: Event | None = None
        for output in outputs:
            if (reader := self._readers.get(output.request_id)) is not None:
                waits = reader.has_heard and not output.finished
                (self._untold if waits else urgent).append((reader, output))
                if not reader.has_heard:
                    reader.has_heard, heard = True, heard or Event()
                if output.finished:
                    del self._readers[output.request_id]
        self._tell(urgent, heard)
        if heard is not None:
            heard.wait(HEARD_S)

    def _tell_others(self) -> None:
        """Hand out the news that have waited."""
        untold, self._untold = self._untold, []
        self._tell(untold)

    def _tell(
        self,
        told: Sequence[tuple["_Reader", RequestOutput | BaseException]],
        heard: Event | None = None,
    ) -> None:
        """Tell readers their news; those whose event loop was closed leave.

        `heard` is set when those of one event loop have taken theirs on.
        """
        of_loops: dict[asyncio.AbstractEventLoop, list[tuple[_Reader, Any]]] = {}
        for reader, news in told:
            of_loops.setdefault(reader.loop, []).append((reader, news))
        for loop, those in of_loops.items():
            try:
                loop.call_soon_threadsafe(_put, those, heard)
            except RuntimeError:
                for reader, _ in those if self.is_alive else ():
                    self._ask(partial(self._leave, reader))

    def _leave(self, reader: "_Reader", engine: Engine) -> None:
        if self._readers.get(reader.request_id) is reader:
            del self._readers[reader.request_id]
            engine.abort(reader.request_id)

    def _tell_aborted(self, engine: Engine) -> None:
        """Tell those whose requests were aborted meanwhile."""
        for each in [each for each in self._readers if not engine.knows(each)]:
            self._tell([(self._readers.pop(each), RequestFailed(f"request {each!r} was aborted"))])

    def _refuse(self, error: QuireError) -> None:
        """Tell everyone who waits that the engine has ended."""
        for reader in list(self._readers.values()):
            self._tell([(reader, error)])
        with suppress(Empty):
            while True:
                called = self._calls.get_nowait()
                if called is not None and called[1].set_running_or_notify_cancel():
                    called[1].set_exception(error)


class _Reader:
    """Where a generator waits: the last news of its request, or why there is no more."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.request_id = ""
        self.has_heard = False
        self._news: RequestOutput | BaseException | None = None
        self._waiting: asyncio.Future[None] | None = None

    def put(self, news: RequestOutput | BaseException) -> None:
        """Put news in the place of older ones; in its event loop."""
        self._news = news
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def get(self) -> RequestOutput:
        """Return the news that were not told yet, as soon as there are some, or raise why there are none."""
        if self._news is None:
            self._waiting = self.loop.create_future()
            await self._waiting
        news, self._news = self._news, None
        assert news is not None
        if isinstance(news, BaseException):
            raise news
        return news


def _put(told: Sequence[tuple[_Reader, Any]], heard: Event | None) -> None:
    for reader, news in told:
        reader.put(news)
    if heard is not None:
        asyncio.get_running_loop().call_soon(heard.set)  # behind the readers, who go on now
