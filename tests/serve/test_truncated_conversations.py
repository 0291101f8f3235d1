"""`truncation: "auto"` of OpenAI's responses: the oldest items go, many at once, until the prompt fits."""

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_help import fixtures

from quire.serve.items import ResponseItem, items_from, places_of

LIMIT = 512
TOO_LONG = r"maximum context length|too many"

server, nothing_stays = fixtures(max_model_len=LIMIT)


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def respond(client, said, **given):
    options = {"max_output_tokens": 8, "temperature": 0, "truncation": "auto", **given}
    return client.responses.create(model="quire-tiny", input=said, **options)


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def called(name, text):
    call = {"type": "function_call", "call_id": name, "name": "read", "arguments": "{}"}
    return [call, {"type": "function_call_output", "call_id": name, "output": text}]


LINE = "a list keeps its order and a tuple does too. "
TALK = [each for at in range(60) for each in (user(f"{at} {LINE}"), said(f"{LINE} {at}"))]


def test_a_conversation_that_is_too_long_is_refused_unless_it_may_be_truncated(client):
    with pytest.raises(openai.BadRequestError, match=TOO_LONG):
        respond(client, [*TALK, user("Why?")], truncation="disabled")
    made = respond(client, [*TALK, user("Why?")])
    assert made.truncation == "auto"
    assert made.usage.input_tokens <= LIMIT - 8
    places = places_of([ResponseItem(**each) for each in [*TALK, user("Why?")]], LIMIT)
    by_hand = respond(client, [*TALK[places[-2] :], user("Why?")], truncation="disabled")
    assert by_hand.output_text == made.output_text
    assert by_hand.usage.input_tokens == made.usage.input_tokens
    asked = {"model": "quire-tiny", "input": [*TALK, user("Why?")]}
    given = {"truncation": "auto", "max_output_tokens": 8}
    counted = client.post("/responses/input_tokens", body=asked | given, cast_to=object)
    assert counted["input_tokens"] == made.usage.input_tokens


def test_what_fits_is_as_without_truncation(client):
    made = respond(client, TALK[:3])
    assert made.output_text == respond(client, TALK[:3], truncation="disabled").output_text
    assert respond(client, TALK[:3]).usage.input_tokens_details.cached_tokens > 100


def test_an_answer_without_a_limit_has_an_eighth_of_the_context(client):
    items = next(
        items for items in ([*TALK[:8], user("a " * size)] for size in range(1, 200, 10))
        if respond(client, items, max_output_tokens=1).usage.input_tokens > LIMIT * 7 // 8
    )  # fmt: skip
    whole = respond(client, items, max_output_tokens=1, truncation="disabled")
    assert whole.usage.input_tokens < LIMIT
    made = respond(client, items, max_output_tokens=None)
    assert made.usage.input_tokens <= LIMIT * 7 // 8


@pytest.mark.parametrize("is_kept", [True, False])
def test_most_prompts_of_a_conversation_begin_like_the_one_before(client, is_kept):
    items, last, num_cuts, longest, before = [], None, 0, 0, 0
    first = {"instructions": f"Be short, {is_kept}.", "max_output_tokens": 8}
    for at in range(24):
        new = user(f"{at} {LINE}")
        items.append(new)
        if is_kept and last:
            last = respond(client, [new], previous_response_id=last.id, **first)
        else:
            last = respond(client, items, **first)
        items.append(said(last.output_text))
        found = last.usage.input_tokens_details.cached_tokens
        longest = max(longest, last.usage.input_tokens)
        num_cuts += found < before
        before = (last.usage.total_tokens - 1) // 16 * 16
    assert last.usage.input_tokens <= longest <= LIMIT - 8
    assert 2 < num_cuts <= 8  # of 24 requests, the last 19 of which are too long
    if is_kept:
        listed = client.responses.input_items.list(last.id, order="asc", limit=100)
        assert len(list(listed)) == 47  # the conversation is kept whole


def test_rounds_of_calls_go_with_their_outputs_and_the_task_stays(client, server):
    rounds = [each for at in range(30) for each in called(f"c{at}", f"{LINE} {at}")]
    items = [{"role": "developer", "content": "D"}, user("old " + LINE), said("done"), user("task"), *rounds]  # fmt: skip
    made = respond(client, items)
    assert made.usage.input_tokens <= LIMIT - 8
    given = [ResponseItem(**each) for each in items]
    for at in places_of(given, 64)[1:]:
        kept = items_from(given, at)
        assert [each.content for each in kept[:1]] == ["D"]
        assert [each.content for each in kept if each.role == "user"][-1] == "task"
    cut = items_from(given, places_of(given, LIMIT)[-1])
    assert [each.type for each in cut] == ["message", "message", "function_call", "function_call_output"]  # fmt: skip
    assert [cut[1].content, cut[-1].output] == ["task", f"{LINE} 29"]


def test_a_last_message_that_is_too_long_alone_is_refused(client, server):
    for long in (LINE * 60, LINE * 80_000):
        with pytest.raises(openai.BadRequestError, match=TOO_LONG) as caught:
            respond(client, [*TALK, user(long)])
        assert caught.value.body["param"] == "input"
    with pytest.raises(openai.BadRequestError, match="max_output_tokens is 600"):
        respond(client, [*TALK, user("Why?")], max_output_tokens=600)
    with pytest.raises(openai.BadRequestError, match="which no item before it makes"):
        respond(client, [called("c", "4")[1], *TALK])
    assert server.service.num_inflight == 0


def test_a_stream_is_truncated_too(client):
    *_, last = respond(client, [*TALK, user("Why?")], stream=True)
    assert last.response.truncation == "auto"
    assert last.response.usage.input_tokens <= LIMIT - 8


PLAIN = st.builds(lambda role, size: ResponseItem(role=role, content="a" * size), st.sampled_from(["user", "assistant", "system"]), st.integers(0, 60))  # fmt: skip
CALLS = st.builds(lambda name: ResponseItem(type="function_call", call_id=name, name="f", arguments="{}"), st.sampled_from("ab"))  # fmt: skip
OUTPUTS = st.builds(lambda name: ResponseItem(type="function_call_output", call_id=name, output="o"), st.sampled_from("ab"))  # fmt: skip


@given(st.lists(PLAIN | CALLS | OUTPUTS, min_size=1, max_size=14), st.integers(1, 400), st.data())
def test_places_part_no_call_from_its_output_and_stay_as_a_conversation_grows(items, step, data):
    calls, known = {}, []
    for each in items:
        if each.type == "function_call":
            calls[each.call_id] = each
        if each.type != "function_call_output" or each.call_id in calls:
            known.append((each, calls.get(each.call_id)))
    items = [each for each, _ in known]
    if not items:
        return
    places = places_of(items, step)
    assert places == sorted({0, *places})
    sizes = []
    for at in places:
        kept = items_from(items, at)
        for place, (each, call) in enumerate(known):
            if place >= at and each.type == "function_call_output":
                assert any(call is one for one in items[at:])
        asked = [each for each in items if each.role == "user"]
        assert not asked or any(each is asked[-1] for each in kept)
        sizes.append(len(kept))
    assert sizes == sorted(sizes, reverse=True)
    end = data.draw(st.integers(1, len(items)))
    if all(any(call is one for one in items[end:]) for each, call in known[end:] if each.type == "function_call_output"):  # fmt: skip
        shorter = places_of(items[:end], step)
        assert [at for at in places if at < end][: len(shorter) - 1] == shorter[:-1]
