"""Items as chat messages, answers as events, and the bounds of kept responses, drawn."""

import asyncio
import json
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from quire import demo_model
from quire.chat.reasoning import FORMATS
from quire.core import CacheManager
from quire.engines.purging import PurgeRequest
from quire.errors import ConfigError
from quire.observe.requests import RequestLog
from quire.serve.items import ResponseItem, messages_of
from quire.serve.operator import Operator
from quire.serve.replies import AnswerMarks
from quire.serve.responses import AskedResponse, ResponseReply, ResponseRequest
from quire.serve.stored import KeptResponses
from quire.web.bodies import read
from quire.web.errors import ApiError

TEXT = st.sampled_from(["", "one", "two words", "ü"])
PARTS = st.sampled_from(["input_text", "output_text", "text"])
CONTENT = TEXT | st.lists(
    st.builds(lambda kind, text: {"type": kind, "text": text}, PARTS, TEXT), max_size=3
)
SOME_ID = st.sampled_from([{}, {"id": None}, {"id": "an-id"}, {"status": "completed", "more": 1}])


def message(role, content, named, more):
    return {"role": role, "content": content} | named | more


MESSAGES = st.builds(
    message,
    st.sampled_from(["user", "assistant", "system", "developer"]),
    CONTENT,
    st.sampled_from([{}, {"type": "message"}]),
    SOME_ID,
)
CALLS = st.sampled_from(["c1", "c2"])
CALLED = st.builds(
    lambda call, name, more: {"type": "function_call", "call_id": call, "name": name, "arguments": "{}"} | more,
    CALLS, st.sampled_from(["add", "sub"]), SOME_ID,
)  # fmt: skip
OUTPUTS = st.builds(
    lambda call, output, more: {"type": "function_call_output", "call_id": call, "output": output} | more,
    CALLS, CONTENT, SOME_ID,
)  # fmt: skip
REASONED = st.builds(
    lambda summary, content: {"type": "reasoning", "id": "rs", "summary": summary} | content,
    st.none() | st.lists(st.just({"type": "summary_text", "text": "short"}), max_size=1),
    st.sampled_from([{}, {"content": None}, {"content": [{"type": "reasoning_text", "text": "long"}]}]),
)  # fmt: skip
ITEMS = st.lists(MESSAGES | CALLED | OUTPUTS | REASONED, min_size=1, max_size=8)


def said_by(content):
    return content if isinstance(content, str) else "".join(each["text"] for each in content or [])


def specified(items, instructions):
    """Return the messages of items in three passes: reasoning beside what follows it, then one message each, then joined."""
    thoughts, alone = [], []
    for item in items:
        if item.get("type") == "reasoning":
            thoughts.append(said_by(item.get("content")) or said_by(item["summary"]))
        else:
            alone.append((item, [each for each in thoughts if each][-1:]))
            thoughts = []
    names, each_one = {}, [("system", instructions, {})] if instructions else []
    for item, thought in alone:
        kind = item.get("type", "message")
        more = {"reasoning_content": thought[0]} if thought else {}
        if kind == "function_call":
            names[item["call_id"]] = item["name"]
            called = {"name": item["name"], "arguments": {}}
            call = {"function": called, "type": "function", "id": item["call_id"]}
            each_one.append(("call", call, more))
        elif kind == "function_call_output":
            told = {"name": names[item["call_id"]], "tool_call_id": item["call_id"]}
            each_one.append(("tool", said_by(item["output"]), told))
        elif item["role"] == "assistant":
            each_one.append(("assistant", said_by(item["content"]), more))
        else:
            role = {"developer": "system"}.get(item["role"], item["role"])
            each_one.append((role, said_by(item["content"]), {}))
    first = next((at for at, each in enumerate(each_one) if each[0] != "system"), len(each_one))
    head = "\n\n".join(text for _, text, _ in each_one[:first])
    joined = [{"role": "system", "content": head}] if first else []
    for role, said, more in each_one[first:]:
        if role != "call":
            joined.append({"role": role, "content": said} | more)
            continue
        if not joined or joined[-1]["role"] != "assistant":
            joined.append({"role": "assistant", "content": ""})
        joined[-1].setdefault("tool_calls", []).append(said)
        for name, value in more.items():
            joined[-1].setdefault(name, value)
    return joined


@given(ITEMS, st.sampled_from([None, "", "Be short."]), st.integers(0, 8))
def test_items_become_the_messages_of_the_specification_whole_or_kept_in_two_turns(
    items, told, cut
):
    def messages(*lists):
        read_as = (
            read(ResponseRequest, json.dumps({"input": each}).encode()).items for each in lists
        )
        return [
            each.plain() for each in messages_of([item for part in read_as for item in part], told)
        ]

    try:
        wanted = specified(items, told)
    except KeyError:  # an output of a call that is not there
        with pytest.raises(ConfigError, match="is the output of call"):
            messages(items)
        return
    assert messages(items) == wanted
    kept = KeptResponses(clock=lambda: 0.0)
    inputs = read(ResponseRequest, json.dumps({"input": items[:cut]}).encode()).items
    kept.keep(None, inputs, {"id": "resp_1", "output": []})
    listed = [each.plain() for each in kept.history(None, "resp_1")]
    assert messages(listed, items[cut:]) == wanted
    assert all(each["id"] for each in listed)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_model())


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def output(text, reason, *, logprobs):
    ids = list(text.encode())
    given = [{each: -0.5} for each in ids] if logprobs else None
    return SimpleNamespace(
        text=text, token_ids=ids, num_tokens=len(ids), logprobs=given, finish_reason=reason
    )


def replies(tokenizer, asked, kept):
    request = msgspec.convert({"input": "a"} | asked, ResponseRequest)
    chat = request.chat(request.items)
    return ResponseReply(
        chat,
        "tiny",
        tokenizer,
        marks=AnswerMarks("hermes", FORMATS["qwen3"]),
        of=AskedResponse(request, kept.append),
    )


SAID = {
    "<think>Let me see.</think>": "Let me see.",
    "<think>\nSo </thin\n</think>\n\n": "So </thin",
}


def replayed(events):
    """Return a response's output as a client puts it together of the events alone."""
    made = []
    for event in events:
        kind, at = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert at == len(made)
            made.append(event["item"])
        elif kind == "content_part.added":
            made[at]["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            part = made[at]["content"][event["content_index"]]
            part["text"] += event["delta"]
        elif kind == "output_text.done":
            part = made[at]["content"][event["content_index"]]
            assert part["text"] == event["text"]
            part["logprobs"] = event["logprobs"]
        elif kind == "reasoning_text.done":
            assert made[at]["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "content_part.done":
            assert made[at]["content"][event["content_index"]] == event["part"]
        elif kind == "function_call_arguments.delta":
            made[at]["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert made[at]["arguments"] == event["arguments"]
        elif kind == "output_item.done":
            assert made[at] == event["item"] | {"status": "in_progress"}
            made[at] = event["item"]
        if "item_id" in event:
            assert event["item_id"] == made[at]["id"]
    return made


def unnamed(document):
    names = ("id", "call_id", "created_at", "completed_at")
    output = [
        {name: each[name] for name in each if name not in names} for each in document["output"]
    ]
    return {name: document[name] for name in document if name not in names} | {"output": output}


@given(
    said=st.tuples(st.sampled_from(["", *SAID]), st.sampled_from(["", "Hi", "Hello, world", "So: " + CALL, CALL + "\n" + CALL, "a <tool", "So: <tool_call>{"])),
    cuts=st.lists(st.integers(0, 130), max_size=6),
    reason=st.sampled_from(["stop", "length", None]),
    options=st.tuples(st.booleans(), st.booleans()),
)  # fmt: skip
def test_the_events_of_a_stream_make_the_whole_response(tokenizer, said, cuts, reason, options):
    (thought, content), text = said, "".join(said)
    parallel, logprobs = options
    include = ["message.output_text.logprobs"] if logprobs else []
    asked = {"parallel_tool_calls": parallel, "include": include}
    kept, raw = [], b""
    streamed = replies(tokenizer, asked, kept)
    raw += b"".join(streamed.opening())
    for cut in sorted(cuts):
        streamed.choices[0].take(output(text[:cut], None, logprobs=logprobs))
        raw += streamed.chunk(streamed.choices[0])
    if reason is None:  # an error ends it
        raw += streamed.broken(ApiError(503, "it ends", code="shutting_down"))
    else:
        streamed.choices[0].take(output(text, reason, logprobs=logprobs))
        raw += streamed.chunk(streamed.choices[0])
    events = [json.loads(each.partition(b"data: ")[2]) for each in raw.split(b"\n\n")[:-1]]
    assert streamed.closing() == []
    assert [each["sequence_number"] for each in events] == [*range(len(events))]
    final = events[-1]["response"]
    if reason is None:
        assert [each["type"] for each in events[-2:]] == ["error", "response.failed"]
        assert (events[-2]["code"], events[-2]["message"]) == ("shutting_down", "it ends")
        assert (final["status"], final["error"]["message"], kept) == ("failed", "it ends", [])
        told = [part["text"] for each in replayed(events) for part in each.get("content", ())]
        assert told == [part["text"] for each in final["output"] for part in each["content"]]
        return
    assert events[-1]["type"] == f"response.{final['status']}"
    assert final["status"] == {"stop": "completed", "length": "incomplete"}[reason]
    assert replayed(events) == final["output"]
    (document,) = kept
    assert json.loads(msgspec.json.encode(document)) == final
    alone = replies(tokenizer, asked, kept)
    alone.choices[0].take(output(text, reason, logprobs=logprobs))
    assert unnamed(json.loads(msgspec.json.encode(alone.whole()))) == unnamed(final)
    calls = [each for each in final["output"] if each["type"] == "function_call"]
    assert len(calls) == min(text.count("add"), text.count("add") if parallel else 1)
    assert final["output"]
    texts = [each["content"][0] for each in final["output"] if each["type"] == "message"]
    # a call that the end cut is no text
    wanted = content.partition("<tool")[0].rstrip() if calls or reason == "length" else content
    thoughts = [each["content"][0] for each in final["output"] if each["type"] == "reasoning"]
    assert [each["text"] for each in thoughts] == ([SAID[thought]] if thought else [])
    counted = final["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert counted == len(thought.rstrip("\n"))
    if thought and not wanted:
        assert not texts
        return
    assert [each["text"] for each in texts] == ([wanted] if wanted or not calls else [])
    if logprobs and texts:
        assert b"".join(bytes(each["bytes"]) for each in texts[0]["logprobs"]).decode() == text


def test_a_purge_forgets_responses_before_it_begins_and_those_that_end_meanwhile():
    kept = KeptResponses()
    inputs = [ResponseItem(role="user", content="secret")]

    async def purge(tenant):
        with pytest.raises(ApiError, match="not found"):
            kept.history(tenant, "r1")
        kept.keep(tenant, inputs, {"id": "r2", "output": []})
        return SimpleNamespace(counts={"blocks": {}})

    running = SimpleNamespace(
        call=None, purge=purge, engine=SimpleNamespace(manager=CacheManager(8, 4), tiers=None)
    )
    service = SimpleNamespace(running=running, log=RequestLog(), model="tiny", kept=kept, pins=None)
    kept.keep("a", inputs, {"id": "r1", "output": []})
    told = asyncio.run(Operator(service).purge(PurgeRequest("a"), None))
    assert told == {"blocks": {}, "responses": 2}
    for name in ("r1", "r2"):
        with pytest.raises(ApiError, match="not found"):
            kept.get("a", name)


class KeptList:
    """A plain list of what is kept."""

    def __init__(self):
        self.all = []  # (tenant, name, size, until), the oldest first

    def live(self, tenant, now):
        self.all = [each for each in self.all if each[3] > now]
        return [each for each in self.all if each[0] == tenant]


STEPS = st.lists(
    st.tuples(st.sampled_from(["keep", "keep", "delete", "forget", "wait"]), st.sampled_from([None, "a", "b"]), st.integers(0, 30)),
    min_size=4,
    max_size=30,
)  # fmt: skip


@given(STEPS)
def test_kept_responses_stay_within_their_bounds_and_the_oldest_go(steps):
    now, model = [0.0], KeptList()
    kept = KeptResponses(lambda: now[0], max_count=3, max_bytes=700, keep_s=50)
    for at, (step, tenant, number) in enumerate(steps):
        own = [name for _, name, *_ in model.live(tenant, now[0])]
        if step == "keep":
            inputs = [ResponseItem(role="user", content="x" * number * 10, id="i")]
            document = {"id": f"r{at}", "output": []}
            kept.keep(tenant, inputs, document)
            size = len(msgspec.json.encode(document)) + len(msgspec.json.encode(inputs))
            model.all.append((tenant, f"r{at}", size, now[0] + 50))
            while (
                len(live := model.live(tenant, now[0])) > 3 or sum(each[2] for each in live) > 700
            ):
                model.all.remove(live[0])
        elif step == "delete" and own:
            name = own[number % len(own)]
            kept.delete(tenant, name)
            model.all = [each for each in model.all if each[1] != name]
        elif step == "forget":
            assert kept.forget(tenant) == len(own)
            model.all = [each for each in model.all if each[0] != tenant]
        elif step == "wait":
            now[0] += number
        for one in (None, "a", "b"):
            live = {each[1] for each in model.live(one, now[0])}
            for name in (f"r{each}" for each in range(len(steps))):
                if name in live:
                    assert kept.get(one, name).document
                    assert len(kept.history(one, name)) == 1
                else:
                    with pytest.raises(ApiError, match="not found: the server keeps the last 3"):
                        kept.get(one, name)
                    with pytest.raises(ApiError, match="send the conversation as input"):
                        kept.history(one, name)
        kept.check()
