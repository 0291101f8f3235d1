"""Mends in flight: what rules change in a request, and what passes byte for byte."""

import base64
import gzip
import json
import unicodedata
from collections import Counter
from hashlib import md5

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.web.mends import Mends

PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses", "completions": "/v1/completions"}  # fmt: skip
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.{}; cc_entrypoint=cli; cch={};"
MOST = 1 << 20
EVERY = ("line-ends", "blanks", "nfc", "sort-tools", "sort-keys")
LINES = ("drop-lines", "pin-lines", r"move-lines=Now: .*", r"drop-lines=Build .*", r"pin-lines=Id: (\w+)")  # fmt: skip


def mended(mends, api, body, headers=()):
    """Return the body that is passed on, as bytes."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    found = mends.mended(PATHS[api], [*headers], sent, MOST)
    return sent if found is None else found.body


# -- drawn bodies --------------------------------------------------------------------------------------------------

words = st.sampled_from(["Rules", "é", "e\u0301", "def f():", "👩‍💻", "`a  b`", "٣", "x-anthropic"])
lines = st.one_of(
    st.lists(words, max_size=4).map("  ".join),
    st.sampled_from(["", "Now: 10:07", "Build 7", "Id: 8f3a", "  - a\u00a0b \t", "Now:"]),
    st.builds(BILLING.format, st.sampled_from(["0d9", "a1b"]), st.sampled_from(["3f2a1", "abcde"])),
)
texts = st.lists(lines, min_size=1, max_size=5).flatmap(
    lambda some: st.sampled_from(["\n", "\r\n", "\n\n\n"]).map(lambda end: end.join(some))
)
control = st.sampled_from([{}, {}, {"cache_control": {"type": "ephemeral"}}])
values = st.recursive(
    st.one_of(st.booleans(), st.integers(), st.just("a  b\r\n"), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("abc"), inner, max_size=3)),
    max_leaves=4,
)  # fmt: skip
schemas = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={"properties": st.dictionaries(st.sampled_from("zyx"), values), "required": st.permutations("zyx")},
)  # fmt: skip
functions = st.builds(
    lambda name, text, schema: {"name": name, "description": text, "parameters": schema},
    st.sampled_from(["read", "bash", "edit", "a"]),
    texts,
    schemas,
)


def contents(kind):
    part = st.builds(lambda text, mark: {"type": kind, "text": text} | mark, texts, control)
    other = st.sampled_from([{"type": "image", "source": {"data": "iVBOR"}}, {"type": "document"}])
    return st.one_of(texts, st.lists(st.one_of(part, other), min_size=1, max_size=3))


tools_of = {
    "chat": functions.map(lambda each: {"type": "function", "function": each}),
    "responses": st.one_of(functions.map(lambda each: {"type": "function"} | each), st.just({"type": "web_search"})),
    "messages": st.builds(
        lambda each, mark: {"name": each["name"], "input_schema": each["parameters"]} | mark, functions, control
    ),
}  # fmt: skip
results = {
    "chat": texts.map(lambda text: {"role": "tool", "tool_call_id": "1", "content": text}),
    "responses": texts.map(
        lambda text: {"type": "function_call_output", "call_id": "1", "output": text}
    ),
    "messages": texts.map(
        lambda text: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": text}]}
    ),
}  # fmt: skip


def messages(api):
    kind = {"responses": "input_text"}.get(api, "text")
    roles = {"messages": ["user", "assistant"]}.get(api, ["user", "assistant", "system", "developer"])  # fmt: skip
    said = st.builds(lambda role, content, more: {"role": role, "content": content} | more, st.sampled_from(roles), contents(kind), st.sampled_from([{}, {"weight": 1.5}]))  # fmt: skip
    return st.lists(st.one_of(said, results[api]), min_size=1, max_size=5)


@st.composite
def bodies(draw):
    """Return an API, and a body of it."""
    api = draw(st.sampled_from([*PATHS]))
    body = {"model": "m", "temperature": draw(st.sampled_from([0, 1.0, 1e-7])), "seed": 2**63}
    if api == "completions":
        prompt = draw(st.one_of(texts, st.just([1, 2]), st.just(["a", "Now: 1\nb"])))
        return api, body | {"prompt": prompt}
    if draw(st.booleans()):
        body["tools"] = draw(st.lists(tools_of[api], max_size=4))
    if api == "messages":
        body["system"] = draw(contents("text"))
    if api == "responses":
        body |= draw(
            st.sampled_from([{}, {"instructions": "Now: 3\r\nBe  kind."}, {"instructions": None}])
        )
    name = "input" if api == "responses" else "messages"
    body[name] = draw(messages(api))
    if api == "responses" and draw(st.booleans()):
        body[name] = draw(texts)
    return api, body


FRAME = {"content", "text", "system", "instructions"}
rules = st.lists(st.sampled_from(EVERY + LINES), min_size=1, max_size=6, unique=True)


def talk(body):
    return body.get("messages", body.get("input"))


def is_system(message):
    return isinstance(message, dict) and message.get("role") in ("system", "developer")


def all_words(value):
    """Return the words of a value, whatever their order, blanks, line ends and Unicode form, and the names in it."""
    if isinstance(value, dict):
        names = [name for name in value if name not in ("cache_control", "type", "role")]
        told = Counter(name for name in names if name not in FRAME)
        return sum((all_words(value[name]) for name in names), told)
    if isinstance(value, list):
        return sum(map(all_words, value), Counter())
    return Counter(unicodedata.normalize("NFC", str(value)).split())


@settings(max_examples=40, deadline=None)
@given(bodies(), rules)
def test_a_second_pass_changes_nothing_and_equal_prompts_stay_equal(drawn, names):
    api, body = drawn
    once = mended(Mends(names), api, body)
    assert mended(Mends(names), api, once) == once
    again = json.loads(json.dumps(body, ensure_ascii=False))
    assert json.loads(mended(Mends(names), api, again)) == json.loads(once)


@settings(max_examples=40, deadline=None)
@given(bodies(), rules)
def test_messages_keep_their_order_and_what_is_no_system_text_stays(drawn, names):
    api, body = drawn
    found = json.loads(mended(Mends(names), api, body))
    rest = {"tools", "system", "instructions", "messages", "input", "prompt"}
    assert {k: v for k, v in found.items() if k not in rest} == {k: v for k, v in body.items() if k not in rest}  # fmt: skip
    if api == "completions" or not isinstance(talk(body), list):
        return
    before = [each for each in talk(body) if not is_system(each)]
    after = [each for each in talk(found) if not is_system(each)]
    assert after[: len(before) - 1] == before[:-1]
    if not any(name.startswith("move") for name in names):
        assert after == before


@settings(max_examples=40, deadline=None)
@given(bodies(), rules)
def test_no_rule_but_drop_and_pin_loses_a_word(drawn, names):
    api, body = drawn
    kept = [name for name in names if not name.startswith(("drop", "pin"))]
    assert all_words(json.loads(mended(Mends(kept), api, body))) == all_words(body)


@settings(max_examples=40, deadline=None)
@given(bodies(), rules, st.sampled_from(["\n", " "]))
def test_a_body_that_no_rule_changes_passes_byte_for_byte(drawn, names, blank):
    api, body = drawn
    mends = Mends(names)
    once = mended(mends, api, body)
    spaced = json.dumps(json.loads(once), indent=1, ensure_ascii=False).replace("\n", blank).encode()  # fmt: skip
    assert mended(mends, api, spaced) == spaced
    headers = [(b"content-type", b"application/json")]
    assert Mends(()).mended(PATHS[api], headers, once, MOST) is None


# -- rules one by one ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["chat", "messages", "responses", "completions"])
@pytest.mark.parametrize("rule", ["drop-lines", "pin-lines"])
def test_bodies_that_differ_in_the_billing_line_alone_are_equal_then(api, rule):
    def body(version, mark):
        line = BILLING.format(version, mark)
        if api == "completions":
            return {"prompt": f"{line}\nYou are an agent.\nTidy up."}
        said = [{"role": "user", "content": "Tidy up."}]
        if api == "messages":
            return {"system": [{"type": "text", "text": line}, {"type": "text", "text": "You are an agent."}], "messages": said}  # fmt: skip
        system = {"role": "system", "content": f"{line}\nYou are an agent."}
        return {"input" if api == "responses" else "messages": [system, *said]}

    one, other = (mended(Mends([rule]), api, body(*each)) for each in (("0d9", "3f2a1"), ("a1b", "fabce")))  # fmt: skip
    assert one == other
    assert b"You are an agent." in one
    assert (b"cch=0;" in one) == (rule == "pin-lines")
    assert b"3f2a1" not in one


def test_a_line_that_moves_goes_behind_the_last_message():
    said = [
        {"role": "system", "content": "Now: 10:07\nBe kind."},
        {"role": "user", "content": "Hi?"},
    ]
    found = json.loads(mended(Mends(["move-lines=Now: .*"]), "chat", {"messages": said}))[
        "messages"
    ]
    assert [each["content"] for each in found] == ["Be kind.", "Hi?\n\nNow: 10:07"]
    said.append({"role": "tool", "tool_call_id": "1", "content": "42"})
    found = json.loads(mended(Mends(["move-lines=Now: .*"]), "chat", {"messages": said}))[
        "messages"
    ]
    assert found[1:] == [*said[1:], {"role": "user", "content": "Now: 10:07"}]


def test_a_breakpoint_of_a_dropped_block_goes_to_the_block_before_it():
    mark = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": "Rules."}, {"type": "text", "text": "Build 7"} | mark]
    body = {"system": system, "messages": [{"role": "user", "content": "Hi?"}]}
    found = json.loads(mended(Mends(["drop-lines=Build .*"]), "messages", body))
    assert found["system"] == [{"type": "text", "text": "Rules."} | mark]


def test_system_texts_of_which_nothing_is_left_go():
    said = {"role": "user", "content": "Hi?"}
    mends = Mends(["drop-lines=Build .*"])
    for body in ({"system": "Build 7"}, {"system": [{"type": "text", "text": "Build 7"}]}):
        assert json.loads(mended(mends, "messages", body | {"messages": [said]})) == {"messages": [said]}  # fmt: skip
    body = {"messages": [{"role": "system", "content": "Build 7"}, said]}
    assert json.loads(mended(mends, "chat", body)) == {"messages": [said]}
    assert mended(mends, "completions", {"prompt": "Build 7"}) == b'{"prompt": "Build 7"}'


def test_tools_in_any_order_of_themselves_and_their_keys_are_equal_then():
    one = [{"name": "b", "input_schema": {"type": "object", "required": ["y", "x"]}}, {"name": "a", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]  # fmt: skip
    other = [{"cache_control": {"type": "ephemeral"}, "input_schema": {}, "name": "a"}, {"input_schema": {"required": ["x", "y"], "type": "object"}, "name": "b"}]  # fmt: skip
    bodies_ = [{"tools": tools, "messages": []} for tools in (one, [other[1], other[0]])]
    mends = Mends(["sort-tools", "sort-keys"])
    found = [mended(mends, "messages", each) for each in bodies_]
    assert found[0] == found[1]
    assert [each["name"] for each in json.loads(found[0])["tools"]] == ["a", "b"]
    assert "cache_control" in json.loads(found[0])["tools"][-1]


def test_blanks_of_system_texts_become_single_and_those_of_others_stay():
    said = [{"role": "system", "content": "You  are \r\n\r\n\r\n\r\n  - kind\u00a0x."}, {"role": "user", "content": "a  b \r\n"}]  # fmt: skip
    found = json.loads(mended(Mends(["blanks", "line-ends"]), "chat", {"messages": said}))["messages"]  # fmt: skip
    assert found == [{"role": "system", "content": "You are\n\n  - kind x."}, said[1]]


# -- bodies that pass --------------------------------------------------------------------------------------------------

TOOLS = b'{"tools": [{"name": "b"}, {"name": "a"}], "messages": []}'


@pytest.mark.parametrize(
    "body",
    [b"", b"no JSON", b"[1]", b'"text"', b'{"tools": [', b'{"tools": 7}', b'{"tools": ["b", "a"]}', b'{"tools": null, "messages": 3}',
     b'{"tools": [{"name": "\\ud800"}, {"name": "a"}]}', b"\xff\xfe", b'{"messages": [3, null, "x"]}', b"[" * 100_000],
)  # fmt: skip
def test_a_body_that_is_not_understood_passes_byte_for_byte(body):
    assert mended(Mends([*EVERY, *LINES]), "messages", body) == body


def test_a_request_that_is_signed_or_of_another_path_is_not_read():
    mends = Mends(["sort-tools"])
    assert mends.reads("POST", "/v1/messages", [])
    assert mends.reads("POST", "/api/anthropic/v1/messages/", [(b"content-encoding", b"gzip")])
    for method, path, header in (
        ("GET", "/v1/messages", ()),
        ("POST", "/v1/embeddings", ()),
        ("POST", "/v1/messages/batches", ()),
        ("POST", "/v1/messages", (b"content-digest", b"sha-256=:x:")),
        ("POST", "/v1/messages", (b"signature-input", b"x")),
        ("POST", "/v1/messages", (b"authorization", b"AWS4-HMAC-SHA256 x")),
        ("POST", "/v1/messages", (b"content-encoding", b"zstd")),
    ):
        assert not mends.reads(method, path, [header] if header else [])
    assert not Mends(()).reads("POST", "/v1/messages", [])


def test_length_md5_and_gzip_fit_the_changed_body():
    packed = gzip.compress(TOOLS)
    headers = [(b"content-length", b"%d" % len(packed)), (b"content-encoding", b"gzip"),
               (b"content-md5", base64.b64encode(md5(packed, usedforsecurity=False).digest())), (b"x-api-key", b"k")]  # fmt: skip
    found = Mends(["sort-tools"]).mended("/v1/messages", headers, packed, MOST)
    given_ = dict(found.headers)
    assert len(found.headers) == 4
    assert given_[b"content-length"] == b"%d" % len(found.body)
    assert given_[b"content-md5"] == base64.b64encode(
        md5(found.body, usedforsecurity=False).digest()
    )
    assert given_[b"x-api-key"] == b"k"
    assert [each["name"] for each in json.loads(gzip.decompress(found.body))["tools"]] == ["a", "b"]


def test_a_packed_body_that_is_no_gzip_or_too_large_once_unpacked_passes_and_is_counted():
    mends, headers = Mends(["sort-tools"]), [(b"content-encoding", b"gzip")]
    for body in (b"no gzip", gzip.compress(b" " * 2 * MOST + TOOLS), gzip.compress(TOOLS)[:-4]):
        assert mends.mended("/v1/messages", headers, body, MOST) is None
    assert mends.num_unread == 3


def test_requests_are_counted_by_rule():
    mends = Mends(["sort-tools", "blanks"])
    for _ in range(2):
        found = mends.mended("/v1/messages", [], TOOLS, MOST)
    assert mends.counts == {"sort-tools": 2}
    assert found.told == "sort-tools"
    assert found.differences[0] == ("sort-tools", "tools", "b, a", "a, b")


@pytest.mark.parametrize(
    ("line", "said"),
    [("sort-passages", "is no rule"), ("sort-tools=x", "takes no pattern"), ("drop-lines=(", "is no pattern"),
     ("drop-lines=.*", "matches an empty line"), ("pin-lines=Build .*", "has no group"), ("move-lines", "needs a pattern")],
)  # fmt: skip
def test_a_rule_that_cannot_be_used_is_refused_with_what_to_do(line, said):
    with pytest.raises(ConfigError, match=said):
        Mends([line])


def test_groups_of_a_pin_that_match_nothing_stay_empty():
    said = [{"role": "system", "content": "Id:\nId:7 b\nId:71 c\r\n"}]
    found = json.loads(mended(Mends([r"pin-lines=Id:((\d)\d*)?(?: .)?"]), "chat", {"messages": said}))  # fmt: skip
    assert found["messages"][0]["content"] == "Id:\nId:0 b\nId:0 c\r\n"
