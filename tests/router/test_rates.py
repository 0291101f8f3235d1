"""Limits by key: buckets, turns, the file of limits, and requests through a router that has them."""

import asyncio
import json
import random
import threading
import time

import pytest
from upstream_help import FakeUpstream, routed, served, wait_for

import plain_http
import quire_router.rates
from clocks import Clock
from quire.errors import ConfigError, InvariantError
from quire.web.errors import ApiError
from quire.web.keys import ApiKeys
from quire_router.rates import KeyLimits, RateLimits, read_limits
from quire_router.usage import AnswerUsage

ANN = {"authorization": "Bearer key-of-ann"}
BOB = {"authorization": "Bearer key-of-bob"}


def refusal(rates, name="ann", num_bytes=0):
    with pytest.raises(ApiError) as raised:
        asyncio.run(rates.begin(name, num_bytes))
    assert raised.value.status == 429
    return raised.value


def answer_of(tokens):
    usage = AnswerUsage()
    usage.read(json.dumps({"usage": {"prompt_tokens": tokens, "completion_tokens": 0}}).encode())
    return usage


def test_requests_beyond_a_minutes_number_are_told_when_to_come_back():
    clock = Clock()
    rates = RateLimits({"*": KeyLimits(rpm=3)}, clock)
    for _ in range(3):
        asyncio.run(rates.begin("ann", 0))(AnswerUsage())
    error = refusal(rates)
    assert (str(error), error.headers) == (
        "the limit of this key is 3 requests a minute: come back in 20 s",
        {"Retry-After": "20"},
    )
    asyncio.run(rates.begin("bob", 0))
    clock.now = 119.9
    assert refusal(rates).headers == {"Retry-After": "1"}
    clock.now = 120.0
    asyncio.run(rates.begin("ann", 0))
    assert rates.refused == {("*", "rpm"): 2}


def test_tokens_are_estimated_at_first_and_settled_at_the_end():
    clock = Clock()
    rates = RateLimits({"ann": KeyLimits(tpm=600)}, clock)
    end = asyncio.run(rates.begin("ann", 4 * 400))
    assert refusal(rates, num_bytes=4 * 400).headers == {"Retry-After": "20"}
    end(AnswerUsage())  # it had no answer
    end = asyncio.run(rates.begin("ann", 4 * 400))
    end(answer_of(900))  # overdrawn by 300
    assert refusal(rates, num_bytes=4).headers == {"Retry-After": "31"}
    clock.now = 131.0
    asyncio.run(rates.begin("ann", 4))
    assert refusal(rates, num_bytes=4 * 10_000).headers == {"Retry-After": "60"}
    clock.now = 191.0
    asyncio.run(rates.begin("ann", 4 * 10_000))  # more than a minute's: once the bucket is full
    asyncio.run(rates.begin("eve", 4 * 10_000))  # no limit is hers


def test_waiting_requests_run_in_their_order_and_no_more_wait_than_may():
    async def main():
        rates, ran = RateLimits({"*": KeyLimits(running=2, waiting=3)}, time.monotonic), []

        async def request(number):
            end = await rates.begin("ann", 0)
            ran.append(number)
            await asyncio.sleep(0.01)
            end(AnswerUsage())
            rates.check()

        tasks = [asyncio.create_task(request(number)) for number in range(5)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 requests at once, and 3 waiting"):
            await rates.begin("ann", 0)
        await rates.begin("bob", 0)
        rates.check()
        await asyncio.gather(*tasks)
        assert ran == [0, 1, 2, 3, 4]

    asyncio.run(main())


def test_a_request_that_waits_too_long_or_whose_client_goes_leaves_its_place(monkeypatch):
    monkeypatch.setattr(quire_router.rates, "QUEUE_S", 0.01)

    async def main():
        rates = RateLimits({"*": KeyLimits(rpm=3, tpm=400, running=1, waiting=1)}, Clock())
        end = await rates.begin("ann", 0)
        with pytest.raises(ApiError, match=r"waiting 0\.01 s for one of them"):
            await rates.begin("ann", 4 * 100)
        gone = asyncio.create_task(rates.begin("ann", 4 * 100))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        next_one = asyncio.create_task(rates.begin("ann", 4 * 100))
        await asyncio.sleep(0)
        end(AnswerUsage())
        next_one.cancel()  # at the very moment that it is its turn
        await asyncio.gather(next_one, return_exceptions=True)
        rates.check()
        (await rates.begin("ann", 4 * 400))(AnswerUsage())  # those that never ran took nothing
        await rates.begin("ann", 4 * 400)
        assert rates.refused == {("*", "waiting"): 1}

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(4))
def test_drawn_requests_break_no_law(seed, monkeypatch):
    monkeypatch.setattr(quire_router.rates, "MOST_KEYS", 6)
    rng, clock = random.Random(seed), Clock()

    async def main():
        limits = {
            "*": KeyLimits(rpm=50, tpm=4000, running=2, waiting=2),
            "ann": KeyLimits(running=1),
        }
        rates = RateLimits(limits, clock)

        async def request():
            name = rng.choice(["ann", *map(str, range(12))])
            try:
                end = await rates.begin(name, rng.randrange(2000))
            except ApiError:
                return
            for _ in range(rng.randrange(4)):
                await asyncio.sleep(0)
            end(answer_of(rng.randrange(900)))

        tasks = []
        for _ in range(600):
            clock.now += rng.choice((0, 0.1, 3, 70))
            tasks.append(asyncio.create_task(request()))
            if rng.random() < 0.1:
                rng.choice(tasks).cancel()
            await asyncio.sleep(0)
            rates.check()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert all(key.num_running <= 2 for key in rates._keys.values())
        assert rates.refused.total() > 0

    asyncio.run(main())


def test_memory_is_bounded_however_many_keys_come():
    clock = Clock()
    rates = RateLimits({"*": KeyLimits(rpm=60)}, clock)
    for number in range(3 * quire_router.rates.MOST_KEYS):
        clock.now += 0.001
        if number < 5000 or number % 60 == 0:
            asyncio.run(rates.begin(str(number), 0))(AnswerUsage())
    rates.check()
    assert len(rates._keys) <= quire_router.rates.MOST_KEYS + 1


def test_a_broken_state_is_noticed():
    rates = RateLimits({"*": KeyLimits(running=1)}, Clock())
    asyncio.run(rates.begin("ann", 0))
    rates._keys["ann"].num_running = 2
    with pytest.raises(InvariantError, match="ann: 2 run"):
        rates.check()


KEYS = ApiKeys([("ann", "key-of-ann"), ("bob", "key-of-bob")], "the-operators")


def test_limits_are_read_by_line(tmp_path):
    file = tmp_path / "limits"
    file.write_text("# limits\nann rpm=60 tpm=1000  # hers\n* running=2 waiting=3\n\n")
    assert read_limits(file, KEYS) == {
        "ann": KeyLimits(rpm=60, tpm=1000),
        "*": KeyLimits(running=2, waiting=3),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ann", "line 1 .* is 'ann'; a line is NAME rpm=N"),
        ("ann rpm=0", "above 0"),
        ("ann rpm=1 rpm=2", "each limit once"),
        ("ann rps=5", "a line is NAME rpm=N"),
        ("ann rpm=5000000000", "a line is NAME rpm=N"),
        ("\nann rpm=1\nann tpm=1", "line 3 .* has 'ann' again"),
        ("eve rpm=1", "no key has the name 'eve'; they are ann, bob"),
        ("ann waiting=1", "give running=N too"),
        ("# nothing", "has no limit"),
    ],
)
def test_wrong_lines_of_limits_are_refused(tmp_path, text, said):
    file = tmp_path / "limits"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_limits(file, KEYS)


def test_a_router_refuses_what_is_beyond_a_keys_limits_and_counts_it():
    fake = FakeUpstream("one")
    with served(fake.app()) as url, routed([url], keys=KEYS) as router:
        router.proxy.rates = RateLimits({"ann": KeyLimits(rpm=2)}, Clock())
        router.well(True)
        statuses = [router.ask(headers=ANN, stream=at == 1).status_code for at in range(3)]
        assert statuses == [200, 200, 429]
        answer = router.ask(headers=ANN)
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert answer.headers["retry-after"] == "30"
        told = router.ask({"messages": []}, "/v1/messages", headers=ANN).json()
        assert told["error"]["type"] == "rate_limit_error"
        assert plain_http.get(f"{router.url}/v1/models", headers=ANN).status_code == 200
        assert router.ask(headers=BOB).status_code == 200
        assert len(fake.asked) == 3
        operator = {"authorization": "Bearer the-operators"}
        text = plain_http.get(f"{router.url}/metrics", headers=operator).text
        assert 'quire_router_limited_total{key="ann",limit="rpm"} 3.0' in text


def test_a_stream_holds_its_place_until_it_ends_or_its_client_goes():
    fake = FakeUpstream("one")
    with served(fake.app()) as url, routed([url], keys=KEYS) as router:
        router.proxy.rates = RateLimits({"*": KeyLimits(running=1, waiting=1)}, time.monotonic)
        router.well(True)
        fake.mood = "slow"
        body = {"stream": True}
        with plain_http.stream(
            "POST", f"{router.url}/v1/completions", json=body, headers=ANN
        ) as one:
            lines = one.iter_lines()
            next(lines)
            answers = []
            waiting = threading.Thread(target=lambda: answers.append(router.ask(headers=ANN)))
            waiting.start()
            key = router.proxy.rates._keys["ann"]
            wait_for(lambda: len(key.waiting) == 1)
            assert router.ask(headers=ANN).status_code == 429
            assert router.ask(headers=BOB).status_code == 200
            fake.mood = "well"
        waiting.join(20)
        assert answers[0].status_code == 200
        wait_for(lambda: key.num_running == 0)


def test_without_keys_each_key_that_clients_send_has_the_limits_of_all():
    fake = FakeUpstream("one")
    with served(fake.app()) as url, routed([url]) as router:
        router.proxy.rates = RateLimits({"*": KeyLimits(rpm=1)}, time.monotonic)
        router.well(True)
        given = [{}, {}, ANN, BOB, ANN]
        statuses = [router.ask(headers=headers).status_code for headers in given]
        assert statuses == [200, 429, 200, 200, 429]
