"""The HTTP client of relays: bytes as they are, connections that are kept, and ends of all kinds."""

import asyncio
import gzip
from contextlib import asynccontextmanager

import pytest

from quire.errors import ConfigError
from quire.web.origin import OriginClient, OriginRequest, passed
from quire.web.origin_answer import MOST_BUFFERED, BrokenOff, Unreached

OK = b"HTTP/1.1 200 OK\r\n"
GET = OriginRequest("GET", b"/x?y=1", [(b"a", b"1"), (b"a", b"2")])


@asynccontextmanager
async def served(*answers, keeps=True, **options):
    """Serve answers, one for each request; yield the origin, heads of requests, and numbers of connections."""
    heads, connections, left = [], [], [*answers]

    async def connected(reader, writer):
        connections.append(writer)
        try:
            while left:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                for piece in left.pop(0):
                    if isinstance(piece, bytes):
                        writer.write(piece)
                        await writer.drain()
                    else:
                        await piece(reader, writer)
                if not keeps:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    origin = OriginClient(f"http://127.0.0.1:{port}/base", **{"idle_s": 5.0} | options)
    try:
        yield origin, heads, connections
    finally:
        origin.close()
        server.close()


def sized(body, *more):
    return [OK + b"".join(each + b"\r\n" for each in more) + b"Content-Length: %d\r\n\r\n" % len(body) + body]  # fmt: skip


async def until(is_so):
    while not is_so():  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.001)


def run(made):
    return asyncio.run(asyncio.wait_for(made, 20))


def test_requests_use_one_connection_one_after_another_and_heads_pass_as_they_are():
    async def main():
        packed = gzip.compress(b"body")
        answer = sized(packed, b"Set-Cookie: a=1", b"SET-cookie: b=2", b"content-encoding: gzip")
        async with served(answer, answer) as (origin, heads, connections):
            for _ in range(2):
                said = await origin.ask(GET)
                assert await said.read() == packed
                assert [value for name, value in said.headers if name == b"set-cookie"] == [
                    b"a=1",
                    b"b=2",
                ]
                said.close()
            assert len(connections) == 1
            assert heads[0].startswith(b"GET /base/x?y=1 HTTP/1.1\r\nhost: 127.0.0.1:")
            assert heads[0].endswith(b"\r\na: 1\r\na: 2\r\n\r\n")
            assert not origin.answers

    run(main())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        ([OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n"], b"abc"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n", *sized(b"abc")], b"abc"),
        ([b"HTTP/1.1 204 No Content\r\n\r\n"], b""),
        (sized(b""), b""),
    ],
)
def test_answers_of_all_forms_end_where_they_end(answer, body):
    async def main():
        async with served(answer, answer) as (origin, _, connections):
            for _ in range(2):
                said = await origin.ask(GET)
                assert await said.read() == body
                assert said.is_whole
                said.close()
            assert len(connections) == 1

    run(main())


def test_an_answer_that_ends_with_its_connection_is_whole_and_one_cut_short_is_broken_off():
    async def main():
        async with served([OK + b"\r\nall of it"], keeps=False) as (origin, _, _):
            said = await origin.ask(GET)
            assert await said.read() == b"all of it"
            said.close()
        for answer in ([OK + b"Content-Length: 9\r\n\r\nhalf"], [OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"]):  # fmt: skip
            async with served(answer, keeps=False) as (origin, _, _):
                said = await origin.ask(GET)
                assert await anext(said) == b"half"
                with pytest.raises(BrokenOff) as broken:
                    await anext(said)
                assert said.has_begun
                assert not broken.value.is_stale
                said.close()
        async with served([b"no http at all\r\n\r\n"]) as (origin, _, _):
            with pytest.raises(BrokenOff, match=r"no HTTP/1\.1"):
                await origin.ask(GET)
            assert not origin.answers

    run(main())


def test_a_head_without_a_body_ends_at_once():
    async def main():
        async with served([OK + b"Content-Length: 9\r\n\r\n"]) as (origin, _, _):
            said = await origin.ask(OriginRequest("HEAD", b"/", []))
            assert (await said.read(), said.is_whole) == (b"", True)
            said.close()

    run(main())


def test_an_idle_connection_that_the_server_closes_is_stale_or_replaced():
    async def main():
        async def silent(reader, writer):
            await reader.readuntil(b"\r\n\r\n")  # the next request comes, and no answer
            raise ConnectionError

        async with served([*sized(b"1"), silent]) as (origin, _, _):
            said = await origin.ask(GET)
            await said.read()
            said.close()
            with pytest.raises(BrokenOff) as broken:
                await origin.ask(GET)
            assert broken.value.is_stale
        async with served(sized(b"1"), sized(b"2"), keeps=False) as (origin, _, connections):
            for body in (b"1", b"2"):
                said = await origin.ask(GET)
                assert await said.read() == body
                said.close()
                await until(lambda: not origin.idle)  # the server's end is seen
            assert len(connections) == 2

    run(main())


def test_a_connection_is_not_kept_where_the_server_closes_it_or_no_time_is_given():
    async def main():
        async with served(sized(b"1", b"Connection: close"), sized(b"2")) as (origin, _, found):
            for _ in range(2):
                said = await origin.ask(GET)
                await said.read()
                said.close()
            assert len(found) == 2
        async with served(sized(b"1"), sized(b"2"), idle_s=0) as (origin, heads, found):
            for _ in range(2):
                said = await origin.ask(GET)
                await said.read()
                said.close()
            assert len(found) == 2
            assert b"connection: close" in heads[0]

    run(main())


def test_a_reader_that_is_slow_stops_the_server():
    async def main():
        sent = 0

        async def flood(_, writer):
            nonlocal sent
            for _ in range(400):
                writer.write(b"x" * 100_000)
                await writer.drain()
                sent += 100_000

        head = OK + b"Content-Length: 40000000\r\n\r\n"
        async with served([head, flood]) as (origin, _, _):
            said = await origin.ask(GET)
            await asyncio.sleep(0.3)
            assert sent < 40_000_000
            assert said._num_waiting < MOST_BUFFERED + (1 << 20)
            assert len(await said.read()) == 40_000_000
            said.close()

    run(main())


def test_a_request_that_is_given_up_or_cancelled_closes_its_connection():
    async def main():
        gone = asyncio.Event()

        async def hang(reader, _):
            if not await reader.read():
                gone.set()

        async with served([hang], [hang]) as (origin, _, _):
            task = asyncio.ensure_future(origin.ask(GET))
            await until(lambda: origin.answers)
            for answer in [*origin.answers]:
                answer.give_up(ValueError("enough"))
            with pytest.raises(ValueError, match="enough"):
                await task
            gone.clear()
            task = asyncio.ensure_future(origin.ask(GET))
            await until(lambda: origin.answers)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gone.wait()
            assert not origin.answers

    run(main())


def test_a_server_that_is_not_there_is_unreached_and_an_address_that_is_none_is_refused():
    async def main():
        async with served() as (origin, _, _):
            pass
        with pytest.raises(Unreached):
            await origin.ask(GET)

    run(main())
    for url in (
        "127.0.0.1:8000",
        "ftp://host",
        "http://",
        "http://me:secret@host",
        "http://h:99999",
    ):
        with pytest.raises(ConfigError) as refusal:
            OriginClient(url)
        assert "secret" not in str(refusal.value)


def test_headers_of_the_connection_are_those_that_it_names_and_the_known_ones():
    given = [(b"connection", b"x-own, close"), (b"x-own", b"1"), (b"te", b"a"), (b"b", b"2")]
    assert passed(given) == [(b"b", b"2")]


def test_an_answer_that_nothing_asked_for_is_no_part_of_the_one_before():
    async def main():
        both = [b"".join(sized(b"1") + sized(b"of another", b"x-other: 1"))]
        async with served(both, sized(b"2")) as (origin, _, connections):
            for body in (b"1", b"2"):
                said = await origin.ask(GET)
                assert await said.read() == body
                assert said.headers == [(b"content-length", b"1")]
                said.close()
            assert len(connections) == 2

    run(main())


def test_trailers_and_lengths_of_bodies_that_do_not_come_are_no_headers_of_an_answer():
    late = [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n0\r\nX-Late: 1\r\n\r\n"]
    unchanged = [b"HTTP/1.1 304 Not Modified\r\nEtag: a\r\nContent-Length: 9\r\n\r\n"]

    async def main():
        async with served(late, unchanged) as (origin, _, connections):
            said = await origin.ask(GET)
            assert await said.read() == b"ab"
            assert said.headers == [(b"transfer-encoding", b"chunked")]
            said.close()
            said = await origin.ask(GET)
            assert (said.status, await said.read()) == (304, b"")
            assert said.headers == [(b"etag", b"a")]
            said.close()
            assert len(connections) == 1

    run(main())


def test_a_connection_whose_server_answers_before_it_takes_the_body_is_not_kept():
    async def main():
        done = asyncio.Event()

        async def wait(*_):
            await done.wait()

        async with served([*sized(b"early"), wait]) as (origin, _, _):
            said = await origin.ask(OriginRequest("POST", b"/", [], b"x" * (32 << 20)))
            assert await said.read() == b"early"
            said.close()
            assert not origin.idle
            done.set()

        async def body():
            yield b"half"
            await done.wait()
            raise ConnectionError

        done.clear()
        async with served(sized(b"early"), [wait]) as (origin, _, _):
            said = await origin.ask(OriginRequest("POST", b"/", [(b"content-length", b"8")], body()))  # fmt: skip
            assert await said.read() == b"early"
            done.set()
            await said.upload
            said.close()
            assert not origin.idle

    run(main())


def test_a_request_that_ends_while_its_server_takes_no_more_ends_in_silence():
    async def main():
        errors, done = [], asyncio.Event()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))

        async def body():
            while True:
                yield b"x" * (1 << 20)

        async def wait(*_):
            await done.wait()

        async with served([wait]) as (origin, _, _):
            task = asyncio.ensure_future(origin.ask(OriginRequest("POST", b"/", [], body())))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0.05)
            assert not errors
            done.set()

    run(main())


def test_a_name_that_cannot_be_is_unreached_and_a_broken_address_is_refused():
    with pytest.raises(Unreached):
        run(OriginClient(f"http://{'a' * 70}").ask(GET))
    with pytest.raises(ConfigError):
        OriginClient("http://[::1:80")
